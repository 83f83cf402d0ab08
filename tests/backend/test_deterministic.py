"""`torch.use_deterministic_algorithms`: nothing raises, and another run has the same bits."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F

NUMBERS = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
PLACES = torch.randint(0, 8, (64,), generator=torch.Generator().manual_seed(1))


def _gradient(function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    values = values.clone().requires_grad_()
    return torch.autograd.grad(function(values).square().sum(), values)[0]


# Each raises or changes its algorithm on CUDA in deterministic mode, or adds in an open order.
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index_add": lambda x, i: torch.zeros(8, 3, device=x.device).index_add(0, i, x),
    "scatter_add": lambda x, i: torch.zeros(8, device=x.device).scatter_add(0, i, x[:, 0]),
    "index_put": lambda x, i: torch.zeros(8, 3, device=x.device).index_put((i,), x, accumulate=True),
    "put": lambda x, i: torch.zeros(8, device=x.device).put_(i, x[:, 0], accumulate=True),
    "embedding": lambda x, i: _gradient(lambda weight: F.embedding(i, weight), x),
    "cumsum": lambda x, i: x.cumsum(0),
    "median": lambda x, i: x.median(0).values,
    "kthvalue": lambda x, i: x.kthvalue(5, 0).values,
    "bincount": lambda x, i: torch.bincount(i, weights=x[:, 0].double()),
    "histc": lambda x, i: torch.histc(x, 7),
    "interpolate": lambda x, i: _gradient(
        lambda image: F.interpolate(image, scale_factor=2, mode="bilinear"), x.reshape(1, 3, 8, 8)
    ),
    "reflection_pad": lambda x, i: _gradient(lambda image: F.pad(image, (2, 2), "reflect"), x.reshape(8, 24)),
    "max_pool": lambda x, i: _gradient(lambda image: F.max_pool2d(image, 3, 1), x.reshape(1, 3, 8, 8)),
}


@pytest.fixture(autouse=True)
def deterministic_algorithms() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("mode", ["debug", "strict", "fused"])
def test_every_run_has_the_same_bits(name: str, mode: str) -> None:
    with torch.tpu.eager_mode(mode):
        first, second = (CALLS[name](NUMBERS.to("tpu"), PLACES.to("tpu")).cpu() for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first, CALLS[name](NUMBERS, PLACES))


def test_the_mode_stays_on() -> None:
    torch.randn(5, device="tpu").median(0)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
