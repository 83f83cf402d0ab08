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


def test_the_gradient_of_an_empty_batch_stays_on_the_device() -> None:
    def pooled(image: torch.Tensor) -> list[torch.Tensor]:
        samples = torch.empty(0, 3, 2, device=image.device)
        values, places = F.max_pool2d(image, 2, return_indices=True)
        return [
            F.fractional_max_pool2d(image, 2, output_size=(3, 4), _random_samples=samples),
            F.max_unpool2d(values, places, 2),
            F.adaptive_max_pool2d(image, 2),
        ]

    torch.tpu.reset_fallback_stats()
    image = torch.empty(0, 3, 8, 8, device="tpu", requires_grad=True)
    for each in pooled(image):
        (gradient,) = torch.autograd.grad(each.sum(), image)
        assert gradient.cpu().shape == image.shape
    assert torch.tpu.fallback_stats() == {}
