"""Fractional max pooling against the CPU, window by window: given samples, both choose the same places."""

import torch
import torch.nn.functional as F


def test_fractional_pooling_with_given_samples() -> None:
    for rank, pool in ((2, F.fractional_max_pool2d), (3, F.fractional_max_pool3d)):
        torch.manual_seed(0)
        image, samples = torch.randn(2, 3, *(7, 9, 8)[:rank]), torch.rand(2, 3, rank)
        expected = pool(image, 2, output_size=(3, 4, 5)[:rank], _random_samples=samples, return_indices=True)
        result = pool(
            image.to("tpu"),
            2,
            output_size=(3, 4, 5)[:rank],
            _random_samples=samples.to("tpu"),
            return_indices=True,
        )
        assert torch.equal(result[0].cpu(), expected[0])
        assert torch.equal(result[1].cpu(), expected[1])
