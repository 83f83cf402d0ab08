"""Gradients of grid sampling where its slopes have kinks: on the pixels themselves, and at the borders."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_gradients_on_pixels_and_outside_agree_with_the_cpu(mode: str, padding_mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 5, 5, generator=generator)
    places = torch.linspace(-1.5, 1.5, 7)  # every second pixel of five, and one beyond each border
    grid = torch.stack(torch.meshgrid(places, places, indexing="xy"), -1).expand(2, 7, 7, 2).clone()
    cotangent = torch.randn(2, 3, 7, 7, generator=generator)

    def gradients(device: str) -> list[Tensor]:
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in (image, grid)]
        sampled = F.grid_sample(*leaves, mode=mode, padding_mode=padding_mode, align_corners=True)
        sampled.backward(cotangent.to(device))
        return [leaf.grad.cpu() for leaf in leaves]

    for ours, theirs in zip(gradients("tpu"), gradients("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)
