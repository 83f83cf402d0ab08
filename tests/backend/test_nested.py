"""Nested tensors: PyTorch's layouts strided and jagged, in training."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

LENGTHS = (3, 1, 4)


def rows(device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(length, 4, generator=generator) for length in LENGTHS]
    return [row.to(device).requires_grad_() for row in made]


def gradients(of: str, device: str) -> list[Tensor]:
    """The rows' gradients of a loss that reads them as a nested tensor."""
    leaves = rows(device)
    if of == "strided":
        nested = torch.nested.as_nested_tensor(leaves)
        weight = torch.linspace(-1, 1, 20).reshape(5, 4).to(device)
        loss = F.relu(F.linear(nested * 2.0, weight)).to_padded_tensor(0.0).pow(2).sum()
    else:
        nested = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
        heads = nested.unflatten(-1, (2, 2)).transpose(1, 2)
        loss = F.scaled_dot_product_attention(heads, heads, heads).values().pow(2).sum()
    loss.backward()
    return [loss.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("of", ["strided", "jagged attention"])
def test_nested_tensors_train_as_on_the_cpu(of: str) -> None:
    for found, expected in zip(gradients(of, "tpu"), gradients(of, "cpu"), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_operator_that_strided_nested_tensors_lack_is_named() -> None:
    nested = torch.nested.nested_tensor([row.detach() for row in rows("tpu")])
    with pytest.raises(NotImplementedError, match=r"aten::sum.*layout=torch.jagged"):
        nested.sum(-1, keepdim=True)


def test_jagged_tensors_are_padded_and_normalised_on_the_device() -> None:
    def outcome(device: str) -> list[Tensor]:
        leaves = rows(device)
        nested = torch.nested.as_nested_tensor(leaves, layout=torch.jagged)
        normed = F.layer_norm(torch.softmax(nested, -1), (4,))
        padded = torch.nested.to_padded_tensor(normed * nested, -1.0)
        means = nested.detach().mean(1)  # PyTorch has no gradient of it
        padded.pow(2).sum().backward()
        return [padded.detach().cpu(), means.cpu(), *(leaf.grad.cpu() for leaf in leaves)]

    before = dict(torch.tpu.fallback_stats())
    for found, expected in zip(outcome("tpu"), outcome("cpu"), strict=True):
        torch.testing.assert_close(found, expected)
    assert torch.tpu.fallback_stats() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_jagged_rows_are_padded_and_back(dtype: torch.dtype) -> None:
    values, offsets = torch.arange(16).reshape(8, 2).to(dtype), torch.tensor([0, 3, 3, 8])
    on_device = offsets.to("tpu")
    for length in (5, 2):
        expected = torch.ops.aten._jagged_to_padded_dense_forward(values, [offsets], [length], -1.0)
        padded = torch.ops.aten._jagged_to_padded_dense_forward(values.to("tpu"), [on_device], [length], -1.0)
        assert torch.equal(padded.cpu(), expected)
    padded = torch.ops.aten._jagged_to_padded_dense_forward(values.to("tpu"), [on_device], [5], -1.0)
    assert torch.equal(torch.ops.aten._padded_dense_to_jagged_forward(padded, [on_device], 8).cpu(), values)
    with pytest.raises(RuntimeError, match="final offset should match total_L value"):
        torch.ops.aten._padded_dense_to_jagged_forward(padded, [on_device], 9).cpu()
    with pytest.raises(RuntimeError, match="found batch item of length 5 when max length"):
        torch.ops.aten._padded_dense_to_jagged_forward(padded[:, :2], [on_device], 8).cpu()
