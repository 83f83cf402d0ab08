"""Complex numbers where their order, their parts or how often they wind decides: as on the CPU."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tpu_backend import to_jax

pytestmark = pytest.mark.usefixtures("no_fallback")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logsumexp": lambda x: x.logsumexp(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "logcumsumexp of nothing": lambda x: x[:, :0].logcumsumexp(1),
    "renorm by the first norm": lambda x: x.renorm(1, 0, 2.0),
    "renorm by the second norm": lambda x: x.renorm(2, 1, 2.0),
    "sgn": torch.sgn,
    "addmm to a number": lambda x: torch.addmm(torch.tensor(2j), x, x.t(), alpha=0.5j),
    "mean by scatter_reduce": lambda x: x.scatter_reduce(
        0, torch.zeros(1, 9, device=x.device).long(), x, "mean"
    ),
    "power by a number": lambda x: torch.pow(x, torch.tensor(2j)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_agree_with_the_cpu(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    values = 4 * torch.randn(5, 9, dtype=torch.complex64, generator=generator)
    torch.testing.assert_close(FUNCTIONS[name](values.to("tpu")).cpu(), FUNCTIONS[name](values))


INF, NAN = float("inf"), float("nan")
PARTS = (0.0, -0.0, 0.5, -1.5, 2.5)
ON_CUTS = torch.tensor([complex(real, imag) for real in PARTS for imag in PARTS])
INFINITE = torch.tensor(
    [complex(real, imag) for real in (*PARTS, INF, -INF, NAN) for imag in (0.0, 1.0, INF, -INF, NAN)]
)


def parts(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


@pytest.mark.parametrize(
    "name", ["acos", "acosh", "asin", "asinh", "atan", "atanh", "log", "sqrt", "rsqrt", "log2", "log10"]
)
def test_the_sign_of_a_zero_says_on_which_side_of_a_cut_a_number_is(name: str) -> None:
    function = getattr(torch, name)
    ours, theirs = parts(function(ON_CUTS.to("tpu")).cpu()), parts(function(ON_CUTS))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("name", ["abs", "exp", "exp2", "log", "log2", "log10", "atan", "atanh"])
def test_infinite_parts_count_as_in_c(name: str) -> None:
    function = getattr(torch, name)
    ours, theirs = parts(function(INFINITE.to("tpu")).cpu()), parts(function(INFINITE))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("exponent", [2.0, 1 - 2j, 0.25])
def test_zero_to_a_complex_power_is_zero(exponent: complex) -> None:
    powers = torch.zeros(3, dtype=torch.complex64, device="tpu") ** torch.tensor(exponent, device="tpu")
    assert powers.tolist() == [0, 0, 0]


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "gt": lambda x: x > x,
    "ge of a number": lambda x: x >= -1,
    "le of a complex number": lambda x: x.real <= 0.5j,
    "lt_": lambda x: x.clone().lt_(x),
    "maximum": lambda x: torch.maximum(x, x.real),
    "minimum": lambda x: torch.minimum(x, x),
    "max": lambda x: x.max(),
    "amin": lambda x: x.amin(1),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "xlogy": lambda x: torch.xlogy(x, -2.0),
    "i0e": torch.special.i0e,
    "trunc": lambda x: torch.div(x, x, rounding_mode="trunc"),
    "nansum": torch.nansum,
    "sort": lambda x: x.sort(),
    "clamp": lambda x: x.clamp(x, x),
    "softplus": torch.nn.functional.softplus,
    "scatter_reduce": lambda x: x.scatter_reduce(0, torch.zeros(1, 2, device=x.device).long(), x, "amax"),
    "fill_ of real numbers": lambda x: x.real.fill_(1j),
    "full of 16 bit": lambda x: torch.full((2,), 2 - 1j, dtype=torch.bfloat16, device=x.device),
    "threshold": lambda x: torch.nn.functional.threshold(x.real.clone(), 2 - 1j, 0.5),
    "scatter": lambda x: x.real.clone().scatter_(0, torch.zeros(1, 2, device=x.device).long(), 1j),
}


@pytest.mark.parametrize("name", REFUSED)
def test_complex_numbers_are_refused_as_on_the_cpu(name: str) -> None:
    values = torch.tensor([[1 + 2j, -1j], [0.5, 2.0]])
    with pytest.raises((RuntimeError, TypeError)) as expected:
        REFUSED[name](values)
    with pytest.raises(expected.type, match=re.escape(str(expected.value))):
        REFUSED[name](values.to("tpu"))


def test_both_parts_are_drawn_uniformly_and_by_themselves() -> None:
    torch.tpu.manual_seed(0)
    drawn = torch.empty(200, 100, dtype=torch.complex64, device="tpu").uniform_(-1, 3).cpu()
    for part in (drawn.real, drawn.imag):
        assert -1 <= part.min() < -0.99
        assert 2.99 < part.max() < 3
        assert part.mean().item() == pytest.approx(1, abs=0.05)
    assert torch.corrcoef(torch.stack([drawn.real.flatten(), drawn.imag.flatten()]))[0, 1].abs() < 0.05


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_complex32_is_converted_viewed_written_and_differentiated_as_on_the_cpu() -> None:
    values = torch.randn(3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))

    def run(device: str) -> list[Tensor]:
        x = values.to(device, copy=True).requires_grad_()
        half = x.chalf()
        (half.to(torch.complex64) * values.to(device)).real.sum().backward()
        with torch.no_grad():
            written = half.clone()
            written[1:, ::2] = half[0, :2]
            parts = torch.view_as_real(written)
            results = [half, written * 2j, written.conj().resolve_conj(), parts, written.imag, x.grad]
        return [result.detach().cpu() for result in results]

    for ours, theirs in zip(run("tpu"), run("cpu"), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(*(torch.view_as_real(x) if x.is_complex() else x for x in (ours, theirs)))


def test_a_complex_number_is_made_of_two_halves() -> None:
    real, imag = torch.linspace(-2, 2, 7).half(), torch.linspace(1, 0, 7).half()
    found = torch.complex(real.to("tpu"), imag.to("tpu"))
    assert found.dtype == torch.complex32
    assert torch.equal(torch.view_as_real(found.cpu()), torch.view_as_real(torch.complex(real, imag)))
    assert "aten::complex" not in torch.tpu.fallback_stats()


def test_jax_refuses_complex32() -> None:
    with pytest.raises(TypeError, match=r"JAX has no equivalent of torch\.complex32"):
        to_jax(torch.zeros(2, dtype=torch.complex64, device="tpu").chalf())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize(
    "shapes", [((32, 16), (16, 24)), ((3, 20, 30), (3, 30, 20)), ((9, 7), (7,))], ids=str
)
def test_products_agree_with_the_cpu(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    left, right = _factors(*shapes, dtype=dtype)
    torch.testing.assert_close((left.to("tpu") @ right.to("tpu")).cpu(), left @ right)


def test_products_are_as_near_to_the_true_ones_as_the_cpus() -> None:
    """XLA's own are 1.09 times as far, in the mean of the largest distances."""
    left, right = _factors((40, 32, 16), (40, 16, 24), dtype=torch.complex64)
    true = left.to(torch.complex128) @ right.to(torch.complex128)

    def distance(product: Tensor) -> float:
        return ((product - true).abs() / true.abs().clamp(min=10)).flatten(1).amax(1).mean().item()

    assert distance((left.to("tpu") @ right.to("tpu")).cpu()) <= 1.04 * distance(left @ right)


def _factors(*shapes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [6 * torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes]
