"""Attention in rows of queries: values and gradients of the CPU, memory of a block of them."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tests.backend.test_blocked_attention import MASKS
from tpu_backend import attention
from tpu_backend.attention import block_of_scores
from tpu_backend.lowering import attention_in_rows

SHAPES = ((2, 4, 300, 8), (2, 2, 333, 8), (2, 2, 333, 6))


def _put_rows_into_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128, the fewest."""
    for name in ("LENGTH_TOGETHER", "MOST_TOGETHER", "MOST_OF_BLOCK"):
        monkeypatch.setattr(attention, name, 1)


def _both(query, key, value, grad, bias, is_causal, has_grad_bias):
    options = is_causal, jnp.asarray(0.3, query.dtype), query.dtype
    output, log_sums = attention_in_rows.forward(query, key, value, bias, *options)
    gradients = attention_in_rows.backward(
        grad, query, key, value, bias, output, log_sums, *options, has_grad_bias
    )
    return output, log_sums, *gradients


@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_the_cpus(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    _put_rows_into_blocks(monkeypatch)
    torch.manual_seed(0)
    queries, keys = SHAPES[0][2], SHAPES[1][2]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES]
    grad = torch.randn(*SHAPES[0][:3], SHAPES[2][3], dtype=torch.float64)
    mask = MASKS[name](queries, keys)
    is_causal = isinstance(mask, str)
    mask = None if is_causal else mask
    if mask is not None and mask.is_floating_point():
        mask = mask.double().requires_grad_()
        given.append(mask)
    expected = F.scaled_dot_product_attention(
        *given[:3], mask, is_causal=is_causal, enable_gqa=True, scale=0.3
    )
    gradients = torch.autograd.grad(expected, given, grad)
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = [jnp.asarray(each.detach().numpy()) for each in (*given[:3], grad)]
        bias = None if mask is None else jnp.asarray(mask.detach().numpy())
        run = jax.jit(_both, static_argnums=(5, 6))
        assert " while(" in run.lower(*arrays, bias, is_causal, len(given) > 3).as_text("hlo")
        output, _, *found = run(*arrays, bias, is_causal, len(given) > 3)
    for ours, theirs in zip((output, *found), (expected, *gradients)):
        torch.testing.assert_close(torch.tensor(ours), theirs.detach(), rtol=1e-9, atol=1e-9)


def test_blocks_of_documents_are_as_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = *SHAPES, (*SHAPES[0][:3], SHAPES[2][3])
    queries, keys = SHAPES[0][2], SHAPES[1][2]
    ids = torch.randint(0, 3, (2, 1, 1, queries + keys + 1))
    ids[..., -1] = 20  # the place of the first query
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        given = [jnp.asarray(torch.randn(size, dtype=torch.float64).numpy()) for size in sizes]
        together = _both(*given, jnp.asarray(ids.numpy()), True, False)
        _put_rows_into_blocks(monkeypatch)
        in_blocks = _both(*given, jnp.asarray(ids.numpy()), True, False)
    for block, all_rows in zip(in_blocks[:-1], together[:-1], strict=True):
        torch.testing.assert_close(torch.tensor(block), torch.tensor(all_rows), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("sizes", "block"),
    [
        ((64, 64, 512, 512), (64, 512)),  # short ones are together whatever the batch
        ((2, 2, 4096, 4096), (2, 4096)),
        ((4, 12, 2048, 2048), (1, 512)),
        ((1, 8, 8192, 8192), (1, 256)),
        (
            (1, 8, 8064, 8192),
            (1, 128),
        ),  # of 252, 256 and 128 rows the last ones divide it, and fill a matrix unit
        ((1, 8, 8200, 8192), (1, 256)),  # nothing does: the last block is filled up
        ((64, 2, 2048, 2048), (1, 2048)),  # a sequence after another: each is small
        ((8, 32, 4096, 4096), (1, 128)),
        ((1, 64, 2**20, 2**20), (1, 128)),
    ],
)
def test_blocks(sizes: tuple[int, int, int, int], block: tuple[int, int]) -> None:
    assert block_of_scores(*sizes) == block


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 8, 8192), (32, 16, 2048)])
def test_memory_is_that_of_a_block(batch: int, heads: int, length: int) -> None:
    sizes = [jax.ShapeDtypeStruct((batch, heads, length, 8), jnp.float32)] * 4
    pairs = jax.ShapeDtypeStruct((1, 1, length, length), jnp.bool_)
    compiled = jax.jit(_both, static_argnums=(5, 6)).lower(*sizes, pairs, False, False).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < batch * heads * length**2 * 4 / 8
