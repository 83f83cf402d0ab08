"""Scaled dot-product attention: its results lie in memory as those of the CPU's fused kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils._python_dispatch
from torch.utils.checkpoint import checkpoint


def _heads_outside() -> torch.Tensor:
    return torch.randn(2, 3, 5, 8)


def _heads_inside() -> torch.Tensor:
    return torch.randn(2, 5, 3, 8).transpose(1, 2)


def _part_of_qkv() -> torch.Tensor:
    return torch.randn(2, 5, 3, 24).transpose(1, 2)[..., 8:16]


def _features_outside() -> torch.Tensor:
    return torch.randn(2, 3, 8, 5).transpose(2, 3)


def _significant(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


@pytest.mark.parametrize("make", [_heads_outside, _heads_inside, _part_of_qkv, _features_outside])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"dropout_p": 0.5},
        {"attn_mask": torch.ones(5, 5).tril().bool()},
        {"attn_mask": torch.zeros(5, 5).requires_grad_()},
    ],
    ids=["plain", "causal", "dropout", "mask", "mask with a gradient"],
)
def test_strides_are_the_cpus(make, options):
    laid_out = make()

    def strides(device: str) -> list[list[int]]:
        query, key, value = (
            torch.empty_strided(laid_out.shape, laid_out.stride(), device=device)
            .copy_(laid_out)
            .requires_grad_()
            for _ in range(3)
        )
        given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        output = F.scaled_dot_product_attention(query, key, value, **given)
        with torch.inference_mode():
            inferred = F.scaled_dot_product_attention(query, key, value, **given)
        gradients = torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
        return [_significant(result) for result in (output, inferred, *gradients)]

    assert strides("tpu") == strides("cpu")


def test_heads_are_joined_by_a_view():
    qkv = torch.randn(2, 5, 3, 3, 8, device="tpu")
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
    mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    joined = mixed.transpose(1, 2).view(2, 5, 24)
    expected = F.scaled_dot_product_attention(query.cpu(), key.cpu(), value.cpu(), is_causal=True)
    torch.testing.assert_close(joined.cpu(), expected.transpose(1, 2).reshape(2, 5, 24))


def test_transforms_and_second_derivatives():
    def loss(query: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, query, query).sin().sum()

    query = _heads_inside()
    ours, theirs = query.to("tpu"), query.double()
    transforms = {
        "gradient": torch.func.grad(loss),
        "of a batch": torch.func.vmap(torch.func.grad(loss), in_dims=1),
        "forward over reverse": lambda x: torch.func.jvp(torch.func.grad(loss), (x,), (x,))[1],
        "reverse over reverse": torch.func.grad(lambda x: torch.func.grad(loss)(x).square().sum()),
    }
    with torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # the CPU's other one has no second
        expected = {name: transform(theirs) for name, transform in transforms.items()}
    for name, transform in transforms.items():
        torch.testing.assert_close(
            transform(ours).cpu(),
            expected[name].float(),
            rtol=1e-4,
            atol=1e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize(
    ("key", "mask"),
    [(torch.float64, None), (torch.float32, torch.float64), (torch.float32, torch.int64)],
    ids=["key", "mask", "mask of integers"],
)
def test_dtypes_that_do_not_go_together_are_refused_as_on_the_cpu(key, mask):
    def refusal(device: str) -> str:
        query, keys = (torch.ones(1, 2, 4, 8, dtype=dtype, device=device) for dtype in (torch.float32, key))
        attn_mask = None if mask is None else torch.ones(4, 4, dtype=mask, device=device)
        with pytest.raises(RuntimeError) as raised:
            F.scaled_dot_product_attention(query, keys, query, attn_mask)
        return str(raised.value)

    assert refusal("tpu") == refusal("cpu")


class _Called(torch.utils._python_dispatch.TorchDispatchMode):
    """The operators that reach the device."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"attn_mask": torch.ones(5, 5).tril().bool()}, {"attn_mask": torch.randn(5, 5)}],
    ids=["causal", "mask", "bias"],
)
@pytest.mark.parametrize("features", [4, 2])  # of values: latent attention has fewer
def test_is_one_operation_and_one_backward(options, features):
    given = {k: v.to("tpu") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    query = _heads_inside().to("tpu").requires_grad_()
    value = torch.randn(*query.shape[:-1], features, device="tpu")
    with _Called() as called:
        output = F.scaled_dot_product_attention(query, query, value, **given)
    assert output.shape == value.shape
    assert [name for name in called.names if name != "detach"] == ["_scaled_dot_product_efficient_attention"]
    with _Called() as called:
        output.backward(torch.ones_like(output))
    assert called.names.count("_scaled_dot_product_efficient_attention_backward") == 1
    assert not any("mm" in name or "softmax" in name for name in called.names)


def _on_both(function, *tensors, **options):
    """What it returns of these tensors on the device and, in float64, on the CPU."""
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        wide = (each.double() if each.is_floating_point() else each for each in tensors)
        expected = function(
            *(each.clone().requires_grad_(each.is_floating_point()) for each in wide), **options
        )
    given = (each.to("tpu").requires_grad_(each.is_floating_point()) for each in tensors)
    return [each.cpu() for each in function(*given, **options)], [each.float() for each in expected]


def test_second_derivatives_are_those_of_the_composite():
    def second(query, key, value):
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        first = torch.autograd.grad(output.sin().sum(), (query, key), create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), (query, key, value))

    found, expected = _on_both(
        second, torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5), (2, 1, 1, 5)], ids=str)
def test_the_operation_gives_a_bias_its_gradient(shape):
    def gradients(query, bias):
        op = torch.ops.aten._scaled_dot_product_efficient_attention
        if query.is_tpu:
            output = op(query, query, query, bias, True)[0]
        else:
            output = ((query @ query.mT) / 8**0.5 + bias).softmax(-1) @ query
        return torch.autograd.grad(output.sin().sum(), (query, bias))

    found, expected = _on_both(gradients, _heads_outside(), torch.randn(shape))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_float_mask_counts_beside_a_causal_one():
    query, mask = _heads_outside(), torch.randn(5, 5)
    both = mask.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = F.scaled_dot_product_attention(query, query, query, both)
    query, mask = query.to("tpu"), mask.to("tpu")
    torch.testing.assert_close(
        F.scaled_dot_product_attention(query, query, query, mask, is_causal=True).cpu(), expected
    )


def test_log_sums_are_of_all_scores_and_say_where_a_query_looks_nowhere():
    query, mask = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.rand(5, 5) > 0.3
    mask[2] = False
    scores = ((query @ query.mT) / 8**0.5).masked_fill(~mask, -torch.inf)
    moved = query.to("tpu")
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    output, log_sums, *_ = op(moved, moved, moved, mask.to("tpu"), True)
    assert log_sums.dtype == torch.float64
    torch.testing.assert_close(log_sums.cpu(), scores.logsumexp(-1))
    assert (output[:, :, 2] == 0).all()
    assert (log_sums[:, :, 2] == -torch.inf).all()


def test_gradients_of_a_part_of_the_keys_use_the_log_sums_of_all():
    """As context parallelism asks for them; in 16 bit the result that is given is rounded."""
    query, key, value, grad = (torch.randn(1, 2, 6, 8) for _ in range(4))
    given = [each.clone().requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*given)
    _, of_key, of_value = torch.autograd.grad(output, given, grad)
    op = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    log_sums = ((query @ key.mT) / 8**0.5).logsumexp(-1).to("tpu")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2)):
        grads, queries, out = (each.detach().to("tpu", dtype) for each in (grad, query, output))
        for part in (slice(0, 2), slice(2, 6)):
            keys, values = (each[:, :, part].to("tpu", dtype) for each in (key, value))
            wanted = [True, True, True, False]
            found = op(grads, queries, keys, values, None, out, log_sums, None, None, 0.0, wanted)
            for ours, all_keys in zip(found[1:3], (of_key, of_value)):
                theirs = all_keys[:, :, part]
                torch.testing.assert_close(ours.float().cpu(), theirs, rtol=tolerance, atol=tolerance)


def test_another_scale_compiles_nothing():
    query = _heads_inside().to("tpu")
    F.scaled_dot_product_attention(query, query, query, scale=0.5).cpu()
    before = torch.tpu.compile_stats()["compilations"]
    scaled = F.scaled_dot_product_attention(query, query, query, scale=0.25).cpu()
    assert torch.tpu.compile_stats()["compilations"] == before
    query = query.cpu()
    torch.testing.assert_close(scaled, F.scaled_dot_product_attention(query, query, query, scale=0.25))


def test_compiled_attention_is_the_operation_too():
    def gradients(query, mask):
        output = F.scaled_dot_product_attention(query, query, query, mask)
        return output, *torch.autograd.grad(output.sin().sum(), query)

    query, mask = _heads_inside(), torch.rand(5, 5) > 0.3
    mask[:, 0] = True
    expected = gradients(query.requires_grad_(), mask)
    query, mask = query.detach().to("tpu").requires_grad_(), mask.to("tpu")
    output = torch.compile(lambda q, m: F.scaled_dot_product_attention(q, q, q, m))(query, mask)
    found = output, *torch.autograd.grad(output.sin().sum(), query)
    for ours, theirs in zip(found, expected):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)
        assert _significant(ours) == _significant(theirs)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputed_attention_draws_as_it_did(use_reentrant: bool):
    def attend(query):
        mixed = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        return F.scaled_dot_product_attention(F.dropout(mixed, 0.3), query, query, dropout_p=0.2)

    query = _heads_inside().to("tpu")

    def gradient(way):
        torch.manual_seed(3)
        leaf = query.clone().requires_grad_()
        way(leaf).sin().sum().backward()
        return leaf.grad.cpu()

    recomputed = gradient(lambda leaf: checkpoint(attend, leaf, use_reentrant=use_reentrant))
    torch.testing.assert_close(recomputed, gradient(attend))
