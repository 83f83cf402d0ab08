"""Scaled dot-product attention: its results lie in memory as those of the CPU's fused kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


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
