"""Operators that meet in one program keep the NaN and infinity that eager PyTorch has.

XLA simplifies what it finds side by side: a mask times y becomes a select, log(exp(x)) becomes x.
"""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tpu_backend.lowering import TABLE, apply

_VALUES = [0.0, 1.0, -1.0, 2.5, float("inf"), float("-inf"), float("nan"), 100.0, -2.0, 3e38]


def _x(device: str) -> torch.Tensor:
    return torch.tensor(_VALUES, device=device)


def _y(device: str) -> torch.Tensor:
    return torch.tensor(list(reversed(_VALUES)), device=device)


def _gradient(function):
    def run(device: str) -> torch.Tensor:
        x = _x(device).requires_grad_()
        function(x, _y(device)).backward(_y(device))
        return x.grad

    return run


_MASKS = {
    "float": lambda d: (_x(d) > 0).float() * _x(d).log(),
    "promoted": lambda d: (_x(d) > 0) * _y(d),
    "promoted on the right": lambda d: _y(d) * (_x(d) > 0),
    "in place": lambda d: _y(d).mul_(_x(d) > 0),
    "double": lambda d: (_x(d) > 0).double() * _y(d),
    "half": lambda d: (_x(d) > 0).half() * _y(d).half(),
    "promoted bfloat16": lambda d: (_x(d) > 0) * _y(d).bfloat16(),
    "int": lambda d: (_x(d) > 0).int() * _y(d),
    "long, then float": lambda d: (_x(d) > 0).long().float() * _y(d),
    "complex": lambda d: torch.view_as_real((_x(d) > 0).to(torch.complex64) * _y(d)),
    "out=": lambda d: torch.gt(_x(d), 0, out=torch.empty(10, device=d)) * _y(d),
    "copied": lambda d: torch.empty(10, device=d).copy_(_x(d) > 0) * _y(d),
    "copied to a slice": lambda d: _sliced(d) * _y(d),
    "of isfinite": lambda d: _x(d).isfinite() * _x(d),
    "expanded": lambda d: (_x(d)[:1] > 0).float().expand(10) * _y(d),
    "outer": lambda d: (_x(d) > 0).float()[:, None] * _y(d),
    "scaled": lambda d: (_x(d) > 0).float() / 0.5 * _y(d),
    "inverted": lambda d: (1 - (_x(d) > 0).float()) * _y(d),
    "eye": lambda d: torch.eye(10, device=d) * _y(d),
    "tril": lambda d: torch.ones(10, 10, device=d, dtype=torch.bool).tril() * _y(d),
    "summed": lambda d: ((_x(d) > 0).float() * _y(d)).sum(),
    "addcmul": lambda d: torch.addcmul(_x(d), (_x(d) > 0).float(), _y(d)),
    "bernoulli": lambda d: torch.bernoulli(torch.zeros(10, device=d)) * _y(d),
    "dropout": lambda d: F.dropout(torch.full((10,), float("inf"), device=d), 0.999).isnan().sum() > 8,
    "gradient of a product": _gradient(lambda x, y: (x > 0).float() * x.log()),
    "gradient of a promoted product": _gradient(lambda x, y: (y > 0) * x),
    "gradient of dropout by hand": _gradient(lambda x, y: x * (y > 0).float() / 0.5),
    "gradient of relu": _gradient(lambda x, y: x.relu() * y),
    "gradient of amax": _gradient(lambda x, y: x.amax().expand(10)),
    "gradient of nan_to_num": _gradient(lambda x, y: x.nan_to_num()),
}


def _sliced(device: str) -> torch.Tensor:
    target = torch.zeros(10, device=device)
    target[2:7] = _x(device)[2:7] > 0
    return target


def _differences(cases) -> list[str]:
    """Cases that are not the CPU's; in fused mode they are one program."""
    results = {name: case("tpu") for name, case in cases.items()}
    return [
        name
        for name, case in cases.items()
        if not torch.allclose(results[name].cpu(), case("cpu"), rtol=1e-5, equal_nan=True)
    ]


@pytest.mark.parametrize("mode", ["fused", "strict"])
def test_a_mask_times_infinity_is_nan(mode: str) -> None:
    with torch.tpu.eager_mode(mode):
        assert _differences(_MASKS) == []


def test_a_mask_times_infinity_is_nan_under_autocast() -> None:
    def run(device: str) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            weight = torch.eye(10, device=device) * 2
            return (_y(device) > 0) * F.linear(
                _x(device)[[1, 2, 3, 4, 5, 6, 7, 8]][:, None].expand(8, 10), weight
            )

    torch.testing.assert_close(run("tpu").cpu(), run("cpu"), equal_nan=True)


_INVERSES = {
    "log(exp)": lambda d: _x(d).exp().log(),
    "log(exp * exp)": lambda d: (_x(d).exp() * _x(d).exp()).log(),
    "exp * exp": lambda d: _x(d).exp() * (_x(d) * -0.8).exp(),
    "exp / exp": lambda d: _x(d).exp() / (_x(d) + 1).exp(),
    "exp2 * exp2": lambda d: (_x(d) * 2).exp2() * (-_x(d)).exp2(),
    "log(pow)": lambda d: torch.pow(_x(d), torch.full((10,), 0.5, device=d)).log(),
    "log(pow by a number)": lambda d: (_x(d) ** 1.5).log(),
    "sqrt of a square": lambda d: (_x(d) * _x(d)).sqrt(),
    "square root of a square": lambda d: (_x(d) ** 2) ** 0.5,
    "rsqrt of a square": lambda d: (_x(d) * _x(d)).rsqrt(),
    "divided by sqrt of a square": lambda d: _x(d) / (_x(d) * _x(d)).sqrt(),
    "log in float64": lambda d: (_x(d).double() * 20).exp().log(),
}


def test_what_overflows_stays_infinite() -> None:
    assert _differences(_INVERSES) == []


def _compiled(function, *specs: jax.ShapeDtypeStruct) -> str:
    return jax.jit(function).lower(*specs).compile().as_text()


def test_keeping_nan_costs_no_fusion() -> None:
    spec = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def masked_log(x):
        mask = apply(
            TABLE["gt.Scalar"], [x, 0.0], {}, (jax.ShapeDtypeStruct(x.shape, jnp.bool_),), jnp.float32
        )[0]
        log = apply(TABLE["log"], [x], {}, (spec,))[0]
        return apply(TABLE["mul.Tensor"], [mask, log], {}, (spec,))[0]

    def log_of_exp(x):
        return apply(TABLE["log"], [apply(TABLE["exp"], [x], {}, (spec,))[0]], {}, (spec,))[0]

    for function in (masked_log, log_of_exp):
        entry = _compiled(function, spec).partition("ENTRY")[2]
        assert entry.count(" fusion(") == 1
        assert entry.count(" = ") == 2, entry  # the parameter and the fusion
