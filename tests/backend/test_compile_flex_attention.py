"""flex_attention under `torch.compile`: values and gradients of the same attention written out on the cpu."""

import logging
import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

LENGTH = 12


@pytest.fixture(autouse=True)
def _whole_graphs(caplog):
    with caplog.at_level(logging.INFO, "tpu_backend.compile"):
        yield
    torch._dynamo.reset()
    assert "is split" not in caplog.text


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


def test_scores_of_16_bit_inputs_are_not_rounded_to_16_bits():
    """An ALiBi bias of -1 a position, far from the diagonal, where bfloat16 knows every 32nd position."""
    q = k = v = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16)

    def far(score, b, h, q, k):
        return score + (k - q + 4096)

    out = torch.compile(flex_attention)(*(each.to("tpu") for each in (q, k, v)), far)
    torch.testing.assert_close(out.cpu(), flex_attention(q, k, v, far), rtol=2e-2, atol=2e-2)


def test_an_index_out_of_range_in_a_score_is_an_error():
    q = torch.randn(1, 2, 4, 8, device="tpu")
    bias = torch.ones(1, device="tpu")
    with pytest.raises(IndexError, match="index 1 is out of bounds for dimension 0 with size 1"):
        torch.compile(flex_attention)(q, q, q, lambda score, b, h, q, k: score * bias[h]).cpu()


def test_other_devices_are_refused_and_served_as_before():
    q = torch.randn(1, 1, 4, 8, requires_grad=True)
    with pytest.raises(Exception, match="does not support backward on CPU"):
        torch.compile(flex_attention, backend="eager")(q, q, q)
