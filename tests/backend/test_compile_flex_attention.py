"""flex_attention under `torch.compile`: values and gradients of the same attention written out on the cpu."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo", "whole_graphs")

LENGTH = 12


def window(b, h, q, k):
    return (q >= k) & (q - k < 5)


def nobody_sees_the_first(b, h, q, k):
    return (q >= k) & (q > 2)


def capped(score, b, h, q, k):
    return 3 * torch.tanh(score / 3)


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mod: str, mask) -> tuple[Tensor, Tensor]:
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    scores = q.float() @ k.float().mT / math.sqrt(q.shape[-1])
    row, column = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    if mod == "bias":
        scores = scores + bias[:, None, None] * (row - column)
    elif mod == "capped":
        scores = capped(scores, 0, 0, 0, 0)
    if mask is not None:
        scores = scores.masked_fill(~mask(0, 0, row, column), -torch.inf)
    weights = torch.nan_to_num(scores.softmax(-1))
    return (weights.to(q.dtype) @ v), scores.logsumexp(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mod: str, block_mask) -> tuple[Tensor, Tensor]:
    mods = {"bias": lambda s, b, h, q, k: s + bias[h] * (q - k), "capped": capped}
    out, aux = flex_attention(
        q, k, v, mods[mod], block_mask=block_mask, enable_gqa=True, return_aux=AuxRequest(lse=True)
    )
    return out, aux.lse


@pytest.mark.parametrize(
    ("mod", "mask", "dtype"),
    [
        ("bias", window, torch.float32),
        ("capped", nobody_sees_the_first, torch.float32),
        ("bias", window, torch.bfloat16),
    ],
)
def test_values_and_gradients(mod, mask, dtype):
    torch.manual_seed(0)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 6)]
    given = [torch.randn(shape).to(dtype) for shape in shapes] + [torch.randn(4)]
    slopes = torch.randn(2, 4, LENGTH, 6), torch.randn(2, 4, LENGTH)
    found = []
    for device in ("cpu", "tpu"):
        inputs = [each.to(device).detach().requires_grad_() for each in given]
        if device == "tpu":
            block_mask = mask and create_block_mask(mask, None, None, LENGTH, LENGTH, device=device)
            out, lse = torch.compile(attend)(*inputs, mod, block_mask)
        else:
            out, lse = written_out(*inputs, mod, mask)
        finite = torch.where(lse.isfinite(), lse, 0)
        total = (out * slopes[0].to(device)).sum() + (finite * slopes[1].to(device)).sum()
        wanted = inputs if mod == "bias" else inputs[:3]
        found.append([each.detach().cpu() for each in (out, lse, *torch.autograd.grad(total, wanted))])
    exact = {"rtol": 1e-4, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-2}
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs, **exact)


def documents(lengths: list[int]):
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def seen(b, h, q, k):
        return (numbers.to(q.device)[q] == numbers.to(q.device)[k]) & (q >= k)

    return seen


@pytest.mark.parametrize("block", [(4, 4), (5, 3), (16, 4), (4, 16)])
@pytest.mark.parametrize(("mod", "mask"), [("bias", window), ("capped", nobody_sees_the_first)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_by_blocks(block, mod, mask, dtype):
    """Of the same attention without blocks; the length is no multiple of every block's."""
    torch.manual_seed(0)
    shapes = [(2, 4, LENGTH, 8), (2, 2, LENGTH, 8), (2, 2, LENGTH, 6)]
    given = [torch.randn(shape).to(dtype) for shape in shapes] + [torch.randn(4)]
    slopes = torch.randn(2, 4, LENGTH, 6).tpu(), torch.randn(2, 4, LENGTH).tpu()
    found = []
    for size in (block, 128):
        inputs = [each.to("tpu").requires_grad_() for each in given]
        block_mask = create_block_mask(mask, None, None, LENGTH, LENGTH, device="tpu", BLOCK_SIZE=size)
        out, lse = torch.compile(attend)(*inputs, mod, block_mask)
        finite = torch.where(lse.isfinite(), lse, 0)
        total = (out * slopes[0]).sum() + (finite * slopes[1]).sum()
        wanted = inputs if mod == "bias" else inputs[:3]
        found.append([each.detach().cpu() for each in (out, lse, *torch.autograd.grad(total, wanted))])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 5e-2}
    torch.testing.assert_close(found[0], found[1], **tolerance)


def test_blocks_that_are_ruled_out_are_not_computed():
    """A key in them is NaN, and nobody notices. Batches and heads have blocks of their own."""

    def own_half(b, h, q, k):
        return (q // 4 == k // 4) & ((q < 8) | (h == 1))

    q, k, v = (torch.randn(1, 2, LENGTH, 8) for _ in range(3))
    k[:, :, 8:], v[:, :, 8:] = torch.nan, torch.nan
    block_mask = create_block_mask(own_half, None, 2, LENGTH, LENGTH, device="tpu", BLOCK_SIZE=4)
    inputs = [each.tpu().requires_grad_() for each in (q, k, v)]
    out = torch.compile(flex_attention)(*inputs, block_mask=block_mask)
    assert out[:, :, :8].isfinite().all()
    gradients = torch.autograd.grad(out[:, :, :8].sum(), inputs)
    assert all(each[:, :, :8].isfinite().all() for each in gradients)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each[:, :, :8] for each in (q, k, v)), attn_mask=torch.block_diag(*[torch.ones(4, 4)] * 2).bool()
    )
    torch.testing.assert_close(out[:, :, :8].cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_s_list_of_blocks_counts():
    """As PyTorch's own kernel has it, where the mask function alone would allow more."""
    one = torch.tensor([[[1, 1, 1]]], dtype=torch.int32, device="tpu")
    places = torch.arange(3, dtype=torch.int32, device="tpu").view(1, 1, 3, 1).expand(1, 1, 3, 3).contiguous()
    block_mask = BlockMask.from_kv_blocks(one, places, BLOCK_SIZE=4, seq_lengths=(LENGTH, LENGTH))
    q, k, v = (torch.randn(1, 1, LENGTH, 8) for _ in range(3))
    out = torch.compile(flex_attention)(q.tpu(), k.tpu(), v.tpu(), block_mask=block_mask)
    seen = torch.block_diag(*[torch.ones(4, 4)] * 3).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_a_mask_may_read_a_buffer_by_blocks():
    lengths = [5, 4, 3]
    block_mask = create_block_mask(documents(lengths), None, None, LENGTH, LENGTH, device="tpu", BLOCK_SIZE=4)
    q, k, v = (torch.randn(1, 1, LENGTH, 8) for _ in range(3))
    out = torch.compile(flex_attention)(q.tpu(), k.tpu(), v.tpu(), block_mask=block_mask)
    seen = torch.block_diag(*[torch.ones(each, each) for each in lengths]).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_scores_of_16_bit_inputs_are_not_rounded_to_16_bits():
    """An ALiBi bias of -1 a position, far from the diagonal, where bfloat16 knows every 32nd position."""
    q = k = v = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)

    def far(score, b, h, q, k):
        return score + (k - q + 4096)

    out = torch.compile(flex_attention)(*(each.to("tpu") for each in (q, k, v)), far)
    torch.testing.assert_close(out.cpu(), flex_attention(q, k, v, far), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [128, 2])
def test_an_index_out_of_range_in_a_score_is_an_error(size):
    q = torch.randn(1, 2, 4, 8, device="tpu", requires_grad=True)
    bias = torch.ones(1, device="tpu")
    block_mask = create_block_mask(window, None, None, 4, 4, device="tpu", BLOCK_SIZE=size)
    with pytest.raises(IndexError, match="index 1 is out of bounds for dimension 0 with size 1"):
        torch.compile(flex_attention)(
            q, q, q, lambda score, b, h, q, k: score * bias[h], block_mask=block_mask
        ).cpu()


def test_other_devices_are_refused_and_served_as_before():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(Exception, match="does not support backward on CPU"):
        torch.compile(flex_attention, backend="eager")(q, q, q)
