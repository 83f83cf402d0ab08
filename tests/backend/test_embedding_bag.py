"""embedding_bag against the CPU: results and gradients, which is all of it that callers see."""

import pytest
import torch
import torch.nn.functional as F

INDICES = torch.tensor([1, 2, 4, 4, 0, 3, 2, 2])
OFFSETS = torch.tensor([0, 3, 3, 5])  # the second bag is empty


def bags(device: str, weighted: bool = False, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    table = torch.randn(6, 3).to(device).requires_grad_()
    weights = torch.rand(8).to(device).requires_grad_() if weighted else None
    offsets = OFFSETS
    if options.get("include_last_offset"):
        offsets = torch.cat([OFFSETS, torch.tensor([8])])
    result = F.embedding_bag(
        INDICES.to(device), table, offsets.to(device), per_sample_weights=weights, **options
    )
    leaves = [table, weights] if weighted else [table]
    return [value.detach().cpu() for value in (result, *torch.autograd.grad(result.square().sum(), leaves))]


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "sum", "weighted": True, "padding_idx": 2},
        {"mode": "mean", "padding_idx": 4},
        {"mode": "mean", "include_last_offset": True},
        {"mode": "max"},
        {"mode": "max", "padding_idx": 2, "include_last_offset": True},
    ],
    ids=str,
)
def test_bags(options) -> None:
    torch.tpu.reset_fallback_stats()
    on_device = bags("tpu", **options)
    assert torch.tpu.fallback_stats() == {}
    torch.testing.assert_close(on_device, bags("cpu", **options))


def test_scaling_by_frequency_divides_by_it() -> None:
    # Not compared with the CPU's kernel: it looks the frequency up at the wrong place.
    scaled, plain = bags("tpu", mode="mean", scale_grad_by_freq=True)[1], bags("cpu", mode="mean")[1]
    frequency = INDICES.bincount(minlength=6).clamp(min=1)
    torch.testing.assert_close(scaled, plain / frequency[:, None])
