"""Max pooling against the CPU: values, places and gradients, to the bit."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

GEOMETRIES: dict[str, dict[str, Any]] = {
    "overlapping": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "with gaps": {"kernel_size": 2, "stride": 3, "ceil_mode": True},
    "of many values": {"kernel_size": 9, "stride": 2, "padding": 4},
}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_places_and_gradients_are_those_of_the_cpu(
    geometry: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 13, 11).to(dtype)
    if geometry["kernel_size"] < 9:  # whose windows may have padding for the place
        image[0, :, :5] = -torch.inf  # windows of nothing else: the first place that is no padding
    results = []
    for device in ("cpu", "tpu"):
        given = image.clone().to(device).requires_grad_()
        values, places = F.max_pool2d(given, return_indices=True, **geometry)
        torch.manual_seed(1)
        values.backward(torch.randn(values.shape).to(dtype).to(device))
        assert given.grad is not None
        results.append([each.detach().cpu() for each in (values, places, given.grad)])
    for expected, found in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_nan_stays_in_all_windows_that_have_it() -> None:
    image = torch.randn(1, 1, 8, 8)
    image[0, 0, 3, 4] = torch.nan
    for kernel, stride in ((2, 1), (3, 2)):
        expected = F.max_pool2d(image, kernel, stride)
        found = F.max_pool2d(image.to("tpu"), kernel, stride).cpu()
        assert torch.equal(found.isnan(), expected.isnan())
