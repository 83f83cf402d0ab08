"""Attention with dropout: one operation, whose backward drops what its forward dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpu_backend import attention

P = 0.3


class Called(TorchDispatchMode):
    """The names of the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _given(length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query and key of grouped heads; values that show the weights."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, length, length), torch.randn(2, 2, length, length)
    value = torch.eye(length).expand(2, 2, -1, -1)
    return [each.to("tpu", dtype).requires_grad_() for each in (query, key, value)]


def _masks(length: int) -> dict[str, dict[str, Any]]:
    return {
        "none": {},
        "causal": {"is_causal": True},
        "pairs": {"attn_mask": torch.rand(2, 1, length, length) > 0.4},
        "bias": {"attn_mask": torch.randn(length, length)},
    }


def _check_against_what_was_dropped(options: dict[str, Any], length: int) -> None:
    given = _given(length)
    on_device = {name: each.to("tpu") if isinstance(each, Tensor) else each for name, each in options.items()}
    with Called() as called:
        output = F.scaled_dot_product_attention(*given, dropout_p=P, enable_gqa=True, **on_device)
    assert "tpu::dropout_attention" in called.names
    found = torch.autograd.grad(output.sin().sum(), given)
    kept = (output != 0).cpu()  # the weights themselves, where they are not dropped

    query, key, value = (each.detach().cpu().requires_grad_() for each in given)
    mask = options.get("attn_mask", torch.ones(length, length, dtype=torch.bool))
    mask = mask.tril() if options.get("is_causal") else mask
    scores = query @ key.repeat_interleave(2, 1).mT / length**0.5
    scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    seen = weights > 0
    assert not kept[~seen].any()
    assert kept[seen].float().mean().item() == pytest.approx(1 - P, abs=0.02)
    expected = (weights * kept / (1 - P)) @ value.repeat_interleave(2, 1)
    gradients = torch.autograd.grad(expected.sin().sum(), (query, key, value))
    for ours, theirs in zip((output, *found), (expected, *gradients), strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", _masks(1))
def test_values_and_gradients_are_those_of_what_was_dropped(name: str) -> None:
    _check_against_what_was_dropped(_masks(40)[name], 40)


def test_so_they_are_in_blocks_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LENGTH_TOGETHER", "MOST_TOGETHER", "MOST_OF_BLOCK"):
        monkeypatch.setattr(attention, name, 1)
    _check_against_what_was_dropped(_masks(200)["pairs"], 200)


def test_blocks_draw_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LENGTH_TOGETHER", "MOST_TOGETHER", "MOST_OF_BLOCK"):
        monkeypatch.setattr(attention, name, 1)
    output = F.scaled_dot_product_attention(*_given(256), dropout_p=P, enable_gqa=True)
    kept = (output != 0).cpu()
    assert (kept[:, :, :128] == kept[:, :, 128:]).float().mean() < 0.7  # by chance 0.58


def test_sequences_one_after_the_other_are_dropped_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LENGTH_TOGETHER", "MOST_TOGETHER", "MOST_OF_BLOCK"):
        monkeypatch.setattr(attention, name, 1)
    output = F.scaled_dot_product_attention(*_given(100), dropout_p=P, enable_gqa=True)
    kept = (output != 0).cpu()
    assert (kept[0] == kept[1]).float().mean() < 0.7  # by chance 0.58


def test_a_seed_drops_the_same_and_a_checkpoint_too() -> None:
    given = _given(40)

    def attend(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, dropout_p=P, enable_gqa=True)

    def run(function: Any) -> list[Tensor]:
        torch.manual_seed(5)
        output = function()
        return [
            output.detach().cpu(),
            *(each.cpu() for each in torch.autograd.grad(output.sin().sum(), given)),
        ]

    plain = run(lambda: attend(*given))
    again = run(lambda: torch.utils.checkpoint.checkpoint(attend, *given, use_reentrant=False))
    for first, second in zip(plain, again, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(attend(*given).cpu(), plain[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_train(dtype: torch.dtype) -> None:
    given = _given(40, dtype)
    output = F.scaled_dot_product_attention(*given, dropout_p=P, enable_gqa=True)
    gradients = torch.autograd.grad(output.sum(), given)
    assert [each.dtype for each in (output, *gradients)] == [dtype] * 4
    assert all(each.isfinite().all() for each in gradients)


def test_all_may_be_dropped() -> None:
    given = _given(8)
    output = F.scaled_dot_product_attention(*given, dropout_p=1.0, enable_gqa=True)
    assert not output.any()
    assert not any(each.any() for each in torch.autograd.grad(output.sum(), given))


def test_second_derivatives_are_refused_and_can_be_had() -> None:
    query, key, value = (each[:, :2] for each in _given(8))
    for of in (torch.sin, torch.clone):  # the gradient of the result needs one itself, or not
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=P)
        with pytest.raises(NotImplementedError, match=r"SDPBackend\.MATH"):
            torch.autograd.grad(of(output).sum(), query, create_graph=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = F.scaled_dot_product_attention(query, key, value, dropout_p=P)
    (gradient,) = torch.autograd.grad(output.sin().sum(), query, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), query)
    assert second.isfinite().all()


def test_a_probability_that_is_none_is_refused_as_on_the_cpu() -> None:
    given = _given(8)
    for device in ("cpu", "tpu"):
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            F.scaled_dot_product_attention(
                *(each.to(device) for each in given), dropout_p=1.5, enable_gqa=True
            )


def test_a_graph_may_have_it() -> None:
    given = _given(24)

    @torch.compile
    def attend(*tensors: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*tensors, dropout_p=P, enable_gqa=True)

    with Called() as called:
        output = attend(*given)
    assert not any("softmax" in name for name in called.names)
    assert (output != 0).float().mean().item() == pytest.approx(1 - P, abs=0.06)
    assert all(each.isfinite().all() for each in torch.autograd.grad(output.sum(), given))
