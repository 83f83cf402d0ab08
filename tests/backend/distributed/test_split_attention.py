"""Attention of which each rank has a part, of the sequence or of the heads, is that of one process."""

import pytest

from tests.backend.distributed.ranks import assert_all_ended_well, run_ranks

INPUTS = """
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("tpu", (world,))
    B, H, L, E = 2, 4, 6 * world, 8  # L is no multiple of 32, to which CUDA's kernel pads log sums
    torch.manual_seed(0)
    Q, K, V, G = (torch.randn(B, H, L, E) for _ in range(4))

    def attend(q, k, v, g, **options):
        q, k, v = (each.detach().requires_grad_() for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, **options)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), g)

    def assert_near(found, expected, case):
        for name, ours, theirs in zip(("output", "of query", "of key", "of value"), found, expected):
            error = ((ours.cpu() - theirs).norm() / theirs.norm()).item()
            assert error < 1e-5, (case, name, error)
"""

CONTEXT = """
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import (
        _cp_options, context_parallel_unshard, set_rotate_method
    )

    def split(is_causal):
        parts = [each.to("tpu") for each in (Q, K, V, G)]
        function = torch.tpu.spmd(attend) if os.environ["HOW"] == "region" else attend
        with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
            assert parts[0].shape == (B, H, L // world, E)
            results = function(*parts, is_causal=is_causal)
            return context_parallel_unshard(mesh, list(results), [2] * 4)

    for is_causal, is_balanced, rotation in (
        (True, True, "allgather"),
        (True, False, "alltoall"),
        (False, False, "allgather"),
    ):
        _cp_options.enable_load_balance = is_balanced
        set_rotate_method(rotation)
        expected = attend(Q, K, V, G, is_causal=is_causal)
        assert_near(split(is_causal), expected, (is_causal, is_balanced, rotation))
    assert torch.tpu.fallback_stats() == {}, torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(("world_size", "how"), [(2, "eager"), (2, "region"), (4, "eager")])
def test_context_parallel_attention_is_that_of_one_process(world_size: int, how: str):
    assert_all_ended_well(run_ranks(INPUTS + CONTEXT, world_size, timeout=240, HOW=how))


HEADS = """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def split(tensors, mask, **options):
        parts = [distribute_tensor(each.to("tpu"), mesh, [Shard(1)]) for each in tensors]
        if mask is not None:
            options["attn_mask"] = distribute_tensor(mask.to("tpu"), mesh, [Replicate()])
        results = attend(*parts, **options)
        if mask is None:
            assert all(each.placements == (Shard(1),) for each in results)
        return [each.full_tensor() for each in results]

    grouped = (Q, K[:, :2], V[:, :2], G)
    for tensors, mask, options in (
        ((Q, K, V, G), None, {"is_causal": True}),
        (grouped, None, {"is_causal": True, "enable_gqa": True}),
        ((Q, K, V, G), torch.rand(L, L) > 0.3, {"scale": 0.5}),
        ((Q, K, V, G), torch.randn(B, H, L, L), {}),
    ):
        assert_near(split(tensors, mask, **options), attend(*tensors, attn_mask=mask, **options), options)
    parts = [distribute_tensor(each.to("tpu"), mesh, [Shard(1)]).requires_grad_() for each in (Q, K, V)]
    out = F.scaled_dot_product_attention(*parts)
    try:
        torch.autograd.grad(out.sum(), parts, create_graph=True)
        raise AssertionError("second derivatives of DTensors")
    except NotImplementedError as error:
        assert "has no second derivatives of DTensors" in str(error), error
    assert torch.tpu.fallback_stats() == {}, torch.tpu.fallback_stats()
    dist.destroy_process_group()
"""


def test_attention_with_its_heads_split_over_ranks_is_that_of_one_process():
    assert_all_ended_well(run_ranks(INPUTS + HEADS, 2, timeout=240))
