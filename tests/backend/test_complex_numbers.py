"""Complex numbers where their order, their parts or how often they wind decides: as on the CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda x: x.logsumexp(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logcumsumexp of nothing": lambda x: x[:, :0].logcumsumexp(1),
    "renorm by the first norm": lambda x: x.renorm(1, 0, 2.0),
    "renorm by the second norm": lambda x: x.renorm(2, 1, 2.0),
    "sgn": torch.sgn,
}


@pytest.fixture(autouse=True)
def without_fallback():
    torch.tpu.reset_fallback_stats()
    yield
    assert torch.tpu.fallback_stats() == {}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_the_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = 4 * torch.randn(5, 9, dtype=torch.complex64, generator=generator)
    torch.testing.assert_close(FUNCTIONS[name](values.to("tpu")).cpu(), FUNCTIONS[name](values))


def test_both_parts_are_drawn_uniformly_and_by_themselves() -> None:
    torch.tpu.manual_seed(0)
    drawn = torch.empty(200, 100, dtype=torch.complex64, device="tpu").uniform_(-1, 3).cpu()
    for part in (drawn.real, drawn.imag):
        assert -1 <= part.min() < -0.99
        assert 2.99 < part.max() < 3
        assert part.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.corrcoef(torch.stack([drawn.real.flatten(), drawn.imag.flatten()]))[0, 1].abs() < 0.05
