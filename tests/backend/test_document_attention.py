"""Attention within documents: values and derivatives of the mask that nobody makes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._python_dispatch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tpu_backend import document_attention


def _tensors(length: int, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    """Query, key and value of two sequences with grouped heads, and documents: not sorted, and one of -1.

    Values have fewer features, as in latent attention.
    """
    torch.manual_seed(0)
    sizes = ((2, 4, length, 16), (2, 2, length, 16), (2, 2, length, 12))
    ids = torch.randint(-1, 3, (2, length))
    return [torch.randn(size, dtype=dtype) for size in sizes], ids


def _masked(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
    length = ids.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool).tril() & (ids[:, :, None] == ids[:, None, :])
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)


def _parts(length: int) -> tuple[list[Tensor], list[Tensor]]:
    """Queries in the second third of their keys, with documents of both; some keys are of none of them."""
    tensors, ids = _tensors(length)
    place = length // 3
    of_keys = ids.masked_fill(torch.rand(ids.shape) > 0.8, 7)
    return [tensors[0][:, :, place : 2 * place], *tensors[1:]], [ids[:, place : 2 * place], of_keys]


def _part_attention(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, of_keys: Tensor) -> Tensor:
    place = torch.tensor(key.shape[2] // 3, device=query.device)
    return document_attention(query, key, value, ids, key_document_ids=of_keys, place=place)


def _masked_part(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, of_keys: Tensor) -> Tensor:
    rows, columns = (torch.arange(each.shape[2]) for each in (query, key))
    seen = (rows[:, None] + key.shape[2] // 3 >= columns) & (ids[:, :, None] == of_keys[:, None, :])
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)


@pytest.mark.parametrize("length", [12, 1500])  # all scores at once, and in blocks
def test_queries_from_a_place_on_with_other_documents_than_their_keys(length: int) -> None:
    tensors, ids = _parts(length)

    def found(attend, device: str) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        output = attend(*given, *(each.to(device) for each in ids))
        return [each.cpu() for each in (output, *torch.autograd.grad(output.sin().sum(), given))]

    for ours, theirs in zip(found(_part_attention, "tpu"), found(_masked_part, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_part_attention(*tensors, *ids), _masked_part(*tensors, *ids))


def test_padding_is_keys_of_a_document_that_no_query_has() -> None:
    tensors, _ = _tensors(600)
    ids, of_keys = torch.ones(1, 600).long(), torch.ones(2, 600).long()
    of_keys[0, :300], of_keys[1, 500:] = 0, 0  # left, right
    seen = torch.ones(600, 600, dtype=torch.bool).tril() & (of_keys == 1)[:, None]

    def found(device: str) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        if device == "cpu":
            output = F.scaled_dot_product_attention(*given, seen[:, None], enable_gqa=True)
        else:
            output = document_attention(*given, ids.to(device), key_document_ids=of_keys.to(device))
        return [each.cpu() for each in (output, *torch.autograd.grad(output.sin().sum(), given))]

    for ours, theirs in zip(found("tpu"), found("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [12, 600])
def test_values_and_gradients_are_those_of_the_mask(length: int) -> None:
    tensors, ids = _tensors(length)

    def found(attend, device: str) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        output = attend(*given, ids.to(device))
        with torch.no_grad():
            again = attend(*given, ids.to(device))
        return [each.cpu() for each in (output, again, *torch.autograd.grad(output.sin().sum(), given))]

    for ours, theirs in zip(found(document_attention, "tpu"), found(_masked, "cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_second_derivatives_are_those_of_the_mask() -> None:
    tensors, ids = _tensors(6)

    def second(attend, device: str, dtype: torch.dtype) -> list[Tensor]:
        given = [each.to(device, dtype).requires_grad_() for each in tensors]
        first = torch.autograd.grad(attend(*given, ids.to(device)).sin().sum(), given, create_graph=True)
        found = torch.autograd.grad(sum(each.square().sum() for each in first), given)
        return [each.float().cpu() for each in found]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = second(_masked, "cpu", torch.float64)
    found = second(document_attention, "tpu", torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_second_derivatives_of_queries_from_a_place_on_are_those_of_the_mask() -> None:
    tensors, ids = _parts(6)

    def second(attend, device: str, dtype: torch.dtype) -> list[Tensor]:
        given = [each.to(device, dtype).requires_grad_() for each in tensors]
        output = attend(*given, *(each.to(device) for each in ids))
        first = torch.autograd.grad(output.sin().sum(), given, create_graph=True)
        found = torch.autograd.grad(sum(each.square().sum() for each in first), given)
        return [each.float().cpu() for each in found]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = second(_masked_part, "cpu", torch.float64)
    found = second(_part_attention, "tpu", torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_transforms_are_those_of_the_mask() -> None:
    (query, key, value), ids = _tensors(6)

    def found(attend, device: str) -> list[Tensor]:
        given = [each.to(device) for each in (query, key, value)]
        documents = ids.to(device)

        def loss(query: Tensor) -> Tensor:
            return attend(query, *given[1:], documents).sin().sum()

        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(given[0], given[0])
            tangent = torch.autograd.forward_ad.unpack_dual(loss(dual)).tangent
        return [torch.func.grad(loss)(given[0]).cpu(), tangent.cpu()]

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = found(_masked, "cpu")
    torch.testing.assert_close(found(document_attention, "tpu"), expected, rtol=1e-4, atol=1e-5)


def test_autocast_casts_as_for_scaled_dot_product_attention() -> None:
    (query, key, value), ids = _tensors(8)
    with torch.autocast("tpu", torch.bfloat16):
        found = document_attention(
            query.to("tpu"), key.to("tpu", torch.bfloat16), value.to("tpu"), ids.to("tpu")
        )
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float().cpu(), _masked(query, key, value, ids), rtol=0.05, atol=0.05)


def test_no_tensor_has_all_pairs_of_tokens() -> None:
    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for each in result if isinstance(result, tuple) else (result,):
                if isinstance(each, Tensor):
                    most.append(each.numel())
            return result

    (query, key, value), ids = _tensors(300)
    given = [each.to("tpu").requires_grad_() for each in (query, key, value)]
    most: list[int] = []
    with Sizes():
        document_attention(*given, ids.to("tpu")).sum().backward()
    assert max(most) == query.numel() < 300**2


def test_what_does_not_fit_is_refused() -> None:
    (query, key, value), ids = _tensors(4)
    with pytest.raises(ValueError, match=r"expected \(B, H, L, E\).*got \(2, 4, 4, 16\), .*\(2, 3\)"):
        document_attention(query, key, value, ids[:, :3])
    with pytest.raises(TypeError, match=r"expected one dtype of floats, got torch\.float32, torch\.float64"):
        document_attention(query, key.double(), value, ids)
    with pytest.raises(TypeError, match=r"expected integer document_ids, got torch\.float32"):
        document_attention(query, key, value, ids.float())
    with pytest.raises(ValueError, match=r"and place; got \(2, 4, 2, 16\), .*\(2, 4\)$"):
        document_attention(query[:, :, :2], key, value, ids[:, :2], key_document_ids=ids)
    for others, message in (
        ({"place": torch.tensor(0)}, r"a place of the shape \(\) alone"),
        ({"place": torch.zeros(1).long(), "key_document_ids": ids}, r"a place of the shape \(1,\)$"),
    ):
        with pytest.raises(ValueError, match=message):
            document_attention(query, key, value, ids, **others)
    with pytest.raises(TypeError, match=r"expected integer place, got torch\.float32"):
        document_attention(query, key, value, ids, key_document_ids=ids, place=torch.tensor(0.0))


def test_another_device_makes_the_mask() -> None:
    tensors, ids = _tensors(12)
    torch.testing.assert_close(document_attention(*tensors, ids), _masked(*tensors, ids))


@pytest.mark.parametrize("sizes", [(2, 0, 12, 16), (2, 2, 12, 0)])
def test_no_heads_or_no_features_are_refused(sizes: tuple[int, ...]) -> None:
    empty = torch.ones(sizes)
    query = torch.ones(2, 4, 12, sizes[3])
    with pytest.raises(ValueError, match=r"^document_attention: expected \(B, H, L, E\)"):
        document_attention(query, empty, empty, torch.zeros(2, 12, dtype=torch.long))


@pytest.mark.parametrize("length", [12, 600])  # all scores at once, and in blocks
@pytest.mark.parametrize("window", [2, 5, 300])
def test_a_window_limits_what_is_seen(length: int, window: int) -> None:
    tensors, ids = _tensors(length)

    def found(device: str, attend: Callable[..., Tensor]) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        output = attend(*given, ids.to(device))
        return [each.cpu() for each in (output, *torch.autograd.grad(output.sin().sum(), given))]

    def masked(query: Tensor, key: Tensor, value: Tensor, ids: Tensor) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool).tril().triu(1 - window)
        seen = seen & (ids[:, :, None] == ids[:, None, :])
        return F.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)

    attend = partial(document_attention, window=window)
    for ours, theirs in zip(found("tpu", attend), found("cpu", masked), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(*tensors, ids), masked(*tensors, ids))


@pytest.mark.parametrize("length", [12, 1500])
def test_a_window_may_be_of_queries_from_a_place_on(length: int) -> None:
    tensors, ids = _parts(length)
    place, window = length // 3, length // 4

    def found(device: str, attend: Callable[..., Tensor]) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        output = attend(*given, *(each.to(device) for each in ids))
        return [each.cpu() for each in (output, *torch.autograd.grad(output.sin().sum(), given))]

    def ours(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, of_keys: Tensor) -> Tensor:
        at = torch.tensor(place, device=query.device)
        return document_attention(query, key, value, ids, key_document_ids=of_keys, place=at, window=window)

    def masked(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, of_keys: Tensor) -> Tensor:
        distances = torch.arange(query.shape[2])[:, None] + place - torch.arange(key.shape[2])
        seen = (distances >= 0) & (distances < window) & (ids[:, :, None] == of_keys[:, None, :])
        return F.scaled_dot_product_attention(query, key, value, seen[:, None], enable_gqa=True)

    for here, there in zip(found("tpu", ours), found("cpu", masked), strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_second_derivatives_know_the_window() -> None:
    tensors, ids = _tensors(12)

    def second(device: str) -> list[Tensor]:
        given = [each.to(device).requires_grad_() for each in tensors]
        with sdpa_kernel(SDPBackend.MATH) if device == "cpu" else nullcontext():
            output = document_attention(*given, ids.to(device), window=3)
        first = torch.autograd.grad(output.sin().sum(), given, create_graph=True)
        return [each.cpu() for each in torch.autograd.grad(sum(each.square().sum() for each in first), given)]

    for ours, theirs in zip(second("tpu"), second("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [1, 0, -3, 2.0])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    tensors, ids = _tensors(12)
    with pytest.raises(ValueError, match="expected a window of 2 tokens or more"):
        document_attention(*tensors, ids, window=window)
