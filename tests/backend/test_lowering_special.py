"""Special functions against SciPy, in both precisions: the operator database tries only a few arguments."""

import jax
import numpy as np
import pytest
import torch
from scipy import special

from tpu_backend.lowering import TABLE, apply

_ARGUMENTS = np.concatenate([np.linspace(-30, 30, 1201), np.linspace(-3, 3, 301), [1e-10, 50, 300, 1000]])
_FUNCTIONS = {
    "special_bessel_j0": special.j0,
    "special_bessel_j1": special.j1,
    "special_bessel_y0": special.y0,
    "special_bessel_y1": special.y1,
    "special_modified_bessel_k0": special.k0,
    "special_modified_bessel_k1": special.k1,
    "special_scaled_modified_bessel_k0": special.k0e,
    "special_scaled_modified_bessel_k1": special.k1e,
    "special_airy_ai": lambda x: special.airy(x)[0],
    "special_erfcx": special.erfcx,
    "special_spherical_bessel_j0": lambda x: special.spherical_jn(0, x),
}
_LARGEST = {  # where float32's own rounding of the argument, or of exp's, shows in the result
    "special_erfcx": 8,
}


def evaluate(name: str, *arguments: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        out = (jax.ShapeDtypeStruct(arguments[-1].shape, arguments[-1].dtype),)
        run = jax.jit(lambda *values: apply(TABLE[name], list(values), {}, out)[0])
        return np.asarray(run(*arguments))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_agree_with_scipy(name: str, dtype: type) -> None:
    single = dtype is np.float32
    limit = _LARGEST.get(name, np.inf) if single else np.inf
    x = _ARGUMENTS[np.abs(_ARGUMENTS) <= limit].astype(dtype)
    with np.errstate(all="ignore"):
        expected = _FUNCTIONS[name](x.astype(np.float64)).astype(dtype)
    expected[x < 0] = np.where(np.isneginf(expected[x < 0]), np.nan, expected[x < 0])  # y0, y1
    tolerance = {"rtol": 2e-6, "atol": 1e-5} if single else {"rtol": 1e-11, "atol": 1e-12}
    np.testing.assert_allclose(evaluate(name, x), expected, **tolerance)


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_functions_at_the_ends_of_their_domain_agree_with_pytorch(name: str) -> None:
    x = np.array([0.0, -0.0, np.inf, -np.inf, np.nan])
    expected = getattr(torch.special, name.removeprefix("special_"))(torch.tensor(x)).numpy()
    np.testing.assert_allclose(evaluate(name, x), expected)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 6.0])
def test_zeta_holds_left_of_zero(exponent: float) -> None:
    start = np.concatenate([np.linspace(-30.45, 30.55, 62), [0.0, -3.0, 1e-3, 1e6]])
    exponents = np.full_like(start, exponent)
    expected = torch.special.zeta(torch.tensor(exponents), torch.tensor(start)).numpy()
    np.testing.assert_allclose(evaluate("special_zeta", exponents, start), expected, rtol=1e-12)


_POLYNOMIALS = [
    *(f"special_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    *(f"special_shifted_chebyshev_polynomial_{kind}" for kind in "tuvw"),
    "special_hermite_polynomial_h",
    "special_hermite_polynomial_he",
    "special_laguerre_polynomial_l",
    "special_legendre_polynomial_p",
]


@pytest.mark.parametrize("name", _POLYNOMIALS)
def test_polynomials_agree_with_pytorch_in_every_degree(name: str) -> None:
    x = np.repeat(np.array([-1.5, -1.0, -0.7, 0.0, 0.3, 1.0, 1.2]), 13)
    degree = np.tile(np.arange(-1.0, 12.0), 7)
    expected = getattr(torch.special, name.removeprefix("special_"))(torch.tensor(x), torch.tensor(degree))
    np.testing.assert_allclose(evaluate(name, x, degree), expected.numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.uint8])
def test_common_divisors_are_the_cpus_and_the_least_integer_has_some(dtype):
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    left = torch.tensor([7, 12, 0, 0, most, 100], dtype=dtype)
    right = torch.tensor([most, 18, 5, 0, 7, 75], dtype=dtype)
    for function in (torch.gcd, torch.lcm):
        assert torch.equal(function(left.to("tpu"), right.to("tpu")).cpu(), function(left, right))
        across = function(left.to("tpu")[:, None], right.to("tpu"))
        assert torch.equal(across.cpu(), function(left[:, None], right))
    left, right = torch.tensor([least, 6], dtype=dtype), torch.tensor([6, least], dtype=dtype)
    assert torch.equal(torch.gcd(left.to("tpu"), right.to("tpu")).cpu(), torch.gcd(left, right))
