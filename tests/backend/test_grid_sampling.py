"""Gradients of grid sampling where its slopes have kinks, on the pixels themselves and at the borders, and
where its taps nearly cancel.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


def gradients(device: str, image: Tensor, grid: Tensor, cotangent: Tensor, **options: Any) -> list[Tensor]:
    leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (image, grid)]
    F.grid_sample(*leaves, **options).backward(cotangent.to(device))
    return [leaf.grad.cpu() for leaf in leaves]


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_gradients_on_pixels_and_outside_agree_with_the_cpu(mode: str, padding_mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, 5, generator=generator)
    places = torch.linspace(-1.5, 1.5, 7)  # every second pixel of five, and one beyond each border
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1).expand(2, 7, 7, 2).clone()
    cotangent = torch.randn(2, 3, 7, 7, generator=generator)
    options = {"mode": mode, "padding_mode": padding_mode, "align_corners": True}
    ours, theirs = (gradients(device, image, grid, cotangent, **options) for device in ("tpu", "cpu"))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("align_corners", [False, True])
def test_bicubic_slopes_round_like_the_cpus(align_corners: bool) -> None:
    """Positions and weights that differ in their last bits would change some slopes by 6e-5."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, 20, generator=generator)
    grid = torch.randn(2, 40, 40, 2, generator=generator)
    cotangent = torch.randn(2, 3, 40, 40, generator=generator)
    ours, theirs = (
        gradients(device, image, grid, cotangent, mode="bicubic", align_corners=align_corners)[1]
        for device in ("tpu", "cpu")
    )
    torch.testing.assert_close(ours, theirs, rtol=1.3e-6, atol=2e-5)
