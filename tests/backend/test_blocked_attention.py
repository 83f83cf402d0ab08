"""Attention in blocks: values and gradients of the CPU, memory that grows with the length alone."""

import math

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tpu_backend.lowering import blocked_attention

MASKS = {
    "none": lambda L, S: None,
    "causal": lambda L, S: "causal",
    "rows that see nothing": lambda L, S: (torch.rand(2, 1, L, S) > 0.5) & (torch.arange(L)[:, None] % 5 > 0),
    "documents": lambda L, S: (torch.arange(L) // 7)[:, None] == (torch.arange(S) // 7),
    "padding": lambda L, S: (torch.arange(S) < torch.tensor([S, 5])[:, None])[:, None, None],
    "bias of a head": lambda L, S: torch.randn(4, 1, S),
    "large bias": lambda L, S: 100 + torch.randn(4, 1, S),
    "bias": lambda L, S: torch.randn(2, 4, L, S),
}


def _both(query, key, value, grad, bias, is_causal):
    factor = jnp.asarray(0.3, query.dtype)
    output, log_sums = blocked_attention.forward(query, key, value, bias, is_causal, factor)
    return (
        output,
        log_sums,
        *blocked_attention.backward(grad, query, key, value, bias, output, log_sums, is_causal, factor),
    )


@pytest.mark.parametrize(
    ("name", "queries", "keys", "key_heads"),
    [(name, 19, 30, 2) for name in MASKS] + [("causal", 30, 19, 1), ("documents", 16, 16, 4)],
)
def test_values_and_gradients_are_the_cpus(monkeypatch, name, queries, keys, key_heads):
    monkeypatch.setattr(blocked_attention, "BLOCK", 8)
    torch.manual_seed(0)
    query, key, value, grad = (
        torch.randn(2, heads, length, 8, dtype=torch.float64)
        for heads, length in ((4, queries), (key_heads, keys), (key_heads, keys), (4, queries))
    )
    mask = MASKS[name](queries, keys)
    is_causal = isinstance(mask, str)
    mask = None if is_causal else mask
    given = [each.requires_grad_() for each in (query, key, value)]
    wide = mask.double() if mask is not None and mask.is_floating_point() else mask
    expected = F.scaled_dot_product_attention(*given, wide, is_causal=is_causal, enable_gqa=True, scale=0.3)
    gradients = torch.autograd.grad(expected, given, grad)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        q, k, v, g = (jnp.asarray(each.detach().numpy()) for each in (query, key, value, grad))
        bias = None if wide is None else jnp.asarray(wide.numpy())
        assert blocked_attention.fits(q, k, v, has_gradients=True)
        output, log_sums, *found = jax.jit(_both, static_argnums=5)(q, k, v, g, bias, is_causal)
    for ours, theirs in zip((output, *found), (expected, *gradients)):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-9, atol=1e-9)
    scores = (query @ key.repeat_interleave(4 // key_heads, 1).mT * 0.3).detach()
    if is_causal:
        scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -math.inf)
    elif mask is not None:
        scores = scores + wide if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    torch.testing.assert_close(torch.tensor(log_sums), scores.logsumexp(-1), rtol=1e-9, atol=1e-9)


def _gradients(query, key, value, **options):
    given = [each.requires_grad_() for each in (query, key, value)]
    output = F.scaled_dot_product_attention(*given, enable_gqa=True, **options)
    return output.detach(), *torch.autograd.grad(output.sin().sum(), given)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "bfloat16"]
)
def test_the_operation_is_in_blocks_and_has_the_cpus_values(dtype, tolerance):
    torch.manual_seed(0)
    shapes = (1, 4, 600, 16), (1, 2, 600, 16), (1, 2, 600, 16)
    given = [torch.randn(shape).to(dtype).float() for shape in shapes]
    expected = _gradients(*(each.clone() for each in given), is_causal=True)
    torch.tpu.reset_fallback_stats()  # of other tests in this process
    found = _gradients(*(each.to("tpu", dtype) for each in given), is_causal=True)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == dtype
        error = (ours.cpu().float() - theirs).norm() / theirs.norm()
        assert error < tolerance
    assert torch.tpu.fallback_stats() == {}


def _temporaries(length: int) -> int:
    """Bytes of XLA's temporaries of a forward and backward pass, which is compiled and not run."""
    sizes = (1, 2, length, 64), (1, 1, length, 64), (1, 1, length, 64), (1, 2, length, 64)
    given = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]

    compiled = jax.jit(_both, static_argnums=5).lower(*given, None, True).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_grows_with_the_length():
    short, long = _temporaries(1024), _temporaries(32 * 1024)
    assert long < 32 * 1.1 * short
    assert long < (32 * 1024) ** 2 * 4 / 32  # a part of the scores of one head, which are 4 GiB


@pytest.mark.parametrize("rows", [1, 2])
def test_documents_have_the_values_of_their_mask(monkeypatch, rows):
    monkeypatch.setattr(blocked_attention, "BLOCK", 8)
    torch.manual_seed(0)
    given = [jnp.asarray(torch.randn(2, heads, 30, 8).numpy()) for heads in (4, 2, 2, 4)]
    ids = jnp.asarray(torch.randint(0, 3, (rows, 1, 1, 30)).sort(-1)[0].numpy())
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        run = jax.jit(_both, static_argnums=5)
        found = run(*given, ids, True)
        expected = run(*given, jnp.swapaxes(ids, -1, -2) == ids, True)
    for ours, theirs in zip(found, expected):
        assert (ours == theirs).all()


def test_documents_need_no_memory_of_pairs():
    def temporaries(length: int) -> int:
        sizes = (1, 2, length, 64), (1, 1, length, 64), (1, 1, length, 64), (1, 2, length, 64)
        given = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
        ids = jax.ShapeDtypeStruct((1, 1, 1, length), jnp.int32)
        compiled = jax.jit(_both, static_argnums=5).lower(*given, ids, True).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(32 * 1024) < 32 * 1.1 * temporaries(1024)
