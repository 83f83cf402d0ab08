"""Elementwise arithmetic, comparisons, logic and bits (see also ``special.py`` and ``activation.py``)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tpu_backend.lowering import complex_numbers
from tpu_backend.lowering.bounds import nonzero_divisor
from tpu_backend.lowering.few_numbers import add_scaled, add_scaled_16_bit, rsqrt_16_bit
from tpu_backend.lowering.matmul import scaled
from tpu_backend.lowering.registry import (
    CannotCompile,
    NotLoweredError,
    converted,
    is_16_bit,
    lowering,
    opmath,
    stored,
)
from tpu_backend.lowering.rounding import opaque

# On a TPU a float64 is a pair of float32.
_NO_FLOAT64_BITS = CannotCompile(
    "INVALID_ARGUMENT: binary op with different element types, s32 and u32, from bit operations on float64",
    frozenset({"float64"}),
)


def is_floating(value: jax.Array) -> bool:
    return jnp.issubdtype(value.dtype, jnp.floating)


def _unless_integral(function):
    """Rounding functions leave integers as they are."""

    def rounded(self):
        return function(self) if jnp.issubdtype(self.dtype, jnp.inexact) else self

    return rounded


def _on_both(of_reals, of_complex):
    def function(self):
        return of_complex(self) if jnp.iscomplexobj(self) else of_reals(self)

    return function


_UNARY = {
    "acos": _on_both(jnp.arccos, complex_numbers.acos),
    "acosh": _on_both(jnp.arccosh, complex_numbers.acosh),
    "asin": _on_both(jnp.arcsin, complex_numbers.asin),
    "asinh": _on_both(jnp.arcsinh, complex_numbers.asinh),
    "atan": _on_both(jnp.arctan, complex_numbers.atan),
    "atanh": _on_both(jnp.arctanh, complex_numbers.atanh),
    "ceil": _unless_integral(jnp.ceil),
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "deg2rad": jnp.deg2rad,
    "exp": _on_both(lambda self: opaque(jnp.exp(self)), complex_numbers.exp),
    "exp2": _on_both(lambda self: opaque(jnp.exp2(self)), complex_numbers.exp2),
    "expm1": jnp.expm1,
    "floor": _unless_integral(jnp.floor),
    "log": _on_both(jnp.log, complex_numbers.log),
    "log10": _on_both(jnp.log10, lambda self: complex_numbers.log(self, 10)),
    "log1p": jnp.log1p,
    "log2": _on_both(jnp.log2, lambda self: complex_numbers.log(self, 2)),
    "neg": lambda self: -self,
    "rad2deg": jnp.rad2deg,
    "reciprocal": jnp.reciprocal,
    "round": _unless_integral(jnp.round),
    "sigmoid": _on_both(jax.nn.sigmoid, complex_numbers.sigmoid),
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": _on_both(lambda self: jnp.sqrt(opaque(self)), complex_numbers.sqrt),
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": _unless_integral(jnp.trunc),
}
for _name, _function in _UNARY.items():
    lowering(_name, promote="result")(_function)

_TESTS = {
    "isnan": jnp.isnan,
    "isinf": jnp.isinf,
    "isposinf": lambda self: jnp.isposinf(self),
    "isneginf": lambda self: jnp.isneginf(self),
    "logical_not": jnp.logical_not,
}
for _name, _function in _TESTS.items():
    lowering(_name)(_function)


@lowering("signbit", on_tpu=_NO_FLOAT64_BITS)
def signbit(self):
    return jnp.signbit(self) if is_floating(self) else self < 0


lowering("abs", promote="opmath")(_on_both(jnp.abs, complex_numbers.abs))
lowering("conj_physical", "_conj_physical")(jnp.conj)


@lowering("angle", promote="opmath")
def angle(self):
    if jnp.iscomplexobj(self):
        return jnp.angle(self)
    return jnp.where(jnp.isnan(self), self, jnp.where(self < 0, jnp.pi, 0.0))  # of -0.0 it is 0


@lowering("bitwise_not")
def bitwise_not(self):
    if jnp.issubdtype(self.dtype, jnp.inexact):
        raise NotLoweredError("the bits of a float: PyTorch refuses it, in its own words on the CPU")
    return jnp.bitwise_not(self)


@lowering("sign", promote="result")
def sign(self):
    if self.dtype == jnp.bool_:
        return self
    return (self > 0).astype(self.dtype) - (self < 0).astype(self.dtype)  # 0 for NaN, as in PyTorch


@lowering("sgn", promote="result")
def sgn(self):
    return jnp.sign(self) if jnp.issubdtype(self.dtype, jnp.complexfloating) else sign(self)


@lowering("frac", promote="result")
def frac(self):
    return self - jnp.trunc(self)


@lowering("round.decimals", promote="result")
def round_decimals(self, *, decimals):
    if not is_floating(self):
        return self
    scale = 10.0 ** abs(decimals)
    return jnp.round(self * scale) / scale if decimals >= 0 else jnp.round(self / scale) * scale


@lowering("nan_to_num", promote="result")
def nan_to_num(self, nan=None, posinf=None, neginf=None, *, out):
    if not jnp.issubdtype(self.dtype, jnp.inexact):
        return self
    limits = jnp.finfo(out[0].dtype)  # not those of float32, in which 16 bit is computed
    posinf = float(limits.max) if posinf is None else posinf
    neginf = float(limits.min) if neginf is None else neginf
    return jnp.nan_to_num(self, nan=nan or 0.0, posinf=posinf, neginf=neginf)


@lowering("rsqrt", promote="result")
def rsqrt(self, *, out):
    dtype, self = out[0].dtype, opaque(self)
    if jnp.iscomplexobj(self):
        return 1 / complex_numbers.sqrt(self)
    return rsqrt_16_bit(self, lambda values: stored(values, dtype)) if is_16_bit(dtype) else lax.rsqrt(self)


# ---- arithmetic


def _number(value, spec):
    """A number among tensors is of their dtype in most of PyTorch's CPU kernels: 0.3 is rounded to 16 bit."""
    is_number = jnp.ndim(value) == 0 and is_16_bit(spec.dtype)
    return stored(jnp.asarray(value, opmath(spec.dtype)), spec.dtype) if is_number else value


def _plus(self, other, alpha, spec):
    if isinstance(alpha, (int, float)) and alpha == 1:
        return self + other
    return _add_scaled(self, jnp.asarray(_number(alpha, spec), other.dtype), other, spec)


def _minus(self, other, alpha, spec):
    if isinstance(alpha, (int, float)) and alpha == 1:
        return self - other
    return _add_scaled(self, -jnp.asarray(_number(alpha, spec), other.dtype), other, spec)


def _add_scaled(self, factor, other, spec):
    if is_16_bit(spec.dtype):
        return add_scaled_16_bit(self, factor, other, lambda values: stored(values, spec.dtype))
    return add_scaled(self, factor, other)


@lowering("add.Tensor", "add.Scalar", promote="result", fits={"alpha": "result"})
def add(self, other, alpha=1, *, out):
    if self.dtype == jnp.bool_:
        return jnp.logical_or(self, jnp.logical_and(other, alpha))
    return _plus(self, jnp.asarray(_number(other, out[0]), self.dtype), alpha, out[0])


@lowering("sub.Tensor", "sub.Scalar", promote="result", fits={"alpha": "result"})
def sub(self, other, alpha=1, *, out):
    return _minus(self, jnp.asarray(_number(other, out[0]), self.dtype), alpha, out[0])


@lowering("rsub.Tensor", "rsub.Scalar", promote="result", fits={"alpha": "result"})
def rsub(self, other, alpha=1, *, out):
    return _minus(jnp.asarray(_number(other, out[0]), self.dtype), self, alpha, out[0])


@lowering("mul.Tensor", "mul.Scalar", promote="result")
def mul(self, other):
    return jnp.logical_and(self, other) if self.dtype == jnp.bool_ else self * other


@lowering("div.Tensor", "div.Scalar")
def div(self, other, *, out):
    dtype = opmath(out[0].dtype)
    self, other = jnp.asarray(self), jnp.asarray(other)
    divisor = other.astype(dtype)
    if not is_floating(other) and is_floating(divisor):
        # XLA takes zeros divided by a converted integer for zeros, and 0 / 0 is not: hide the conversion.
        divisor = jnp.maximum(divisor, jnp.finfo(dtype).min)
    return converted(self, dtype) / divisor


def _trunc_divide(self: jax.Array, other: Any, storage: Any) -> jax.Array:
    other = jnp.asarray(other, self.dtype)
    if is_floating(self):
        # A divisor for each element: XLA multiplies by the reciprocal of one that it broadcasts, and
        # 2.5 / 0.001 becomes 2499.
        quotient = self / jnp.where(jnp.isnan(self), jnp.nan, other)
        return jnp.trunc(stored(quotient, storage))  # as on the CPU, a 16-bit 17.97 becomes 18
    other = nonzero_divisor(self, other)
    return lax.div(*jnp.broadcast_arrays(self, other))


@lowering("floor_divide", "floor_divide.Scalar", promote="result")
def floor_divide(self, other, *, out):
    self = _number(self, out[0])
    other = jnp.asarray(other, self.dtype)  # not rounded to 16 bit: the CPU's kernel does not either
    if not is_floating(self):
        return jnp.floor_divide(self, nonzero_divisor(self, other))
    # PyTorch's div_floor_floating (c10/util/generic_math.h): exact where self / other would round up to an
    # integer.
    remainder_ = lax.rem(*jnp.broadcast_arrays(self, other))
    quotient = (self - remainder_) / other
    quotient = jnp.where((remainder_ != 0) & ((other < 0) != (remainder_ < 0)), quotient - 1, quotient)
    floored = jnp.floor(quotient)
    floored = jnp.where(quotient - floored > 0.5, floored + 1, floored)
    floored = jnp.where(quotient != 0, floored, self / other * 0)  # a zero with its sign
    return jnp.where(other == 0, self / other, floored)


@lowering("div.Tensor_mode", "div.Scalar_mode", promote="result")
def div_mode(self, other, *, rounding_mode, out=None):
    if rounding_mode is None:
        return div(self, other, out=out)
    if rounding_mode == "floor":
        return floor_divide(self, other, out=out)
    return _trunc_divide(self, other, out[0].dtype)


@lowering("fmod.Tensor", "fmod.Scalar", promote="result")
def fmod(self, other, *, out):
    other = jnp.asarray(_number(other, out[0]), self.dtype)
    if not is_floating(self):
        other = nonzero_divisor(self, other)
    return lax.rem(*jnp.broadcast_arrays(self, other))


@lowering("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", promote="result")
def remainder(self, other, *, out):
    self, other = _number(self, out[0]), _number(other, out[0])
    other = jnp.asarray(other, self.dtype)
    if not is_floating(self):
        other = nonzero_divisor(self, other)
    return jnp.remainder(self, other)


@lowering("pow.Tensor_Scalar", promote="result", static=("exponent",))
def pow_scalar(self, exponent, *, out):
    if isinstance(exponent, (int, float)):
        if exponent in (3, -2) and out[0].dtype == jnp.bfloat16:  # products of bfloat16, as on the CPU
            square = stored(self * self, jnp.bfloat16)
            return square * self if exponent == 3 else 1 / square
        if out[0].dtype != jnp.float16:  # whose power is C's, which is infinity for -inf ** 0.5
            if exponent == 0.5:
                return _UNARY["sqrt"](self)
            if exponent == -0.5:
                return rsqrt(self, out=out)
        if jnp.issubdtype(self.dtype, jnp.integer):
            if not 0 <= exponent <= jnp.iinfo(self.dtype).max:
                raise NotLoweredError("a power of integers that PyTorch refuses, in its own words on the CPU")
            return lax.integer_pow(self, exponent)
        if float(exponent).is_integer() and abs(exponent) <= 16 and self.dtype != jnp.bool_:
            return lax.integer_pow(self, int(exponent))
        if (
            out[0].dtype == jnp.float16
            and math.isfinite(exponent)
            and abs(exponent) > float(jnp.finfo(jnp.float16).max)
        ):
            raise NotLoweredError(
                "an exponent outside of the dtype: PyTorch refuses it, in its own words on the CPU"
            )
    return pow_tensor(self, jnp.asarray(exponent, self.dtype), out=out)


def _integer_power(base, exponent):
    """By squaring, all bits of the exponent (`jnp.power` looks at six); what overflows wraps."""

    def is_left(state):
        return jnp.any(state[1] != 0)

    def squared(state):
        base, exponent, result = state
        return base * base, exponent >> 1, jnp.where(exponent & 1, result * base, result)

    base, exponent = jnp.broadcast_arrays(base, exponent)
    return lax.while_loop(is_left, squared, (base, exponent, jnp.ones_like(base)))[2]


@lowering("pow.Tensor_Tensor", "pow.Scalar", promote="result")
def pow_tensor(self, exponent, *, out):
    if isinstance(exponent, complex):
        exponent = jnp.asarray(exponent, self.dtype)
    self, exponent = jnp.asarray(_number(self, out[0]), exponent.dtype), _number(exponent, out[0])
    if jnp.issubdtype(exponent.dtype, jnp.complexfloating):
        return complex_numbers.power(self, exponent)
    if jnp.issubdtype(exponent.dtype, jnp.inexact):
        return opaque(jnp.power(self, exponent))
    if exponent.dtype == jnp.bool_:
        return jnp.logical_or(self, jnp.logical_not(exponent))
    result = _integer_power(self, jnp.maximum(exponent, 0))
    if jnp.issubdtype(exponent.dtype, jnp.unsignedinteger):
        return result
    # A negative power of an integer is 0 unless the base is 1 or -1.
    of_minus_one = jnp.where(exponent % 2 == 0, 1, -1)
    negative = jnp.where(self == 1, 1, jnp.where(self == -1, of_minus_one, 0))
    return jnp.where(exponent < 0, negative, result)


@lowering("lerp.Scalar", promote="result", fits={"weight": "opmath"})
@lowering("lerp.Tensor", promote="result")
def lerp(self, end, weight):
    near, far = self + weight * (end - self), end - (end - self) * (1 - weight)
    if isinstance(weight, (int, float)):
        return near if abs(weight) < 0.5 else far
    return jnp.where(jnp.abs(weight) < 0.5, near, far)


@lowering("addcmul", promote="result", fits={"value": "opmath"})
def addcmul(self, tensor1, tensor2, *, value=1):
    return self + scaled(tensor1, value) * tensor2


@lowering("addcdiv", promote="result", fits={"value": "opmath"})
def addcdiv(self, tensor1, tensor2, *, value=1):
    return self + scaled(tensor1, value) / tensor2


# ---- bounds


@lowering("clamp", promote="result", fits={"min": "result", "max": "result"})
@lowering("clamp.Tensor", promote="result")
def clamp(self, min=None, max=None):
    if min is not None:
        self = maximum(self, min)
    return self if max is None else minimum(self, max)


def _bound(self, number):
    """Of a complex bound of real numbers the real part: an order of complex numbers would lose NaN."""
    return number.real if jnp.iscomplexobj(number) and not jnp.iscomplexobj(self) else number


@lowering("clamp_min", promote="result", fits={"min": "result"})
@lowering("clamp_min.Tensor", "maximum", promote="result")
def maximum(self, other):
    return jnp.maximum(self, _bound(self, other))


@lowering("clamp_max", promote="result", fits={"max": "result"})
@lowering("clamp_max.Tensor", "minimum", promote="result")
def minimum(self, other):
    return jnp.minimum(self, _bound(self, other))


lowering("fmax", promote="result")(lambda self, other: jnp.fmax(self, other))
lowering("fmin", promote="result")(lambda self, other: jnp.fmin(self, other))

# ---- binary functions of real numbers

lowering("atan2", promote="result")(lambda self, other: jnp.arctan2(self, other))
lowering("hypot", promote="result")(lambda self, other: jnp.hypot(self, other))
lowering("copysign.Tensor", "copysign.Scalar", promote="result", on_tpu=_NO_FLOAT64_BITS)(
    lambda self, other: jnp.copysign(self, other)
)
lowering("logaddexp2", promote="result")(lambda self, other: jnp.logaddexp2(self, other))
lowering("nextafter", on_tpu=_NO_FLOAT64_BITS)(lambda self, other: jnp.nextafter(self, other))


@lowering("gcd", promote="result")
def gcd(self, other):
    """Euclid's algorithm with C's remainder, as on the CPU: the least integer is its own absolute value."""

    def is_left(pair):
        return jnp.any(pair[0] != 0)

    def divided(pair):
        divisor, number = pair
        remainder = lax.rem(number, jnp.where(divisor == 0, 1, divisor))
        return jnp.where(divisor == 0, divisor, remainder), jnp.where(divisor == 0, number, divisor)

    pair = jnp.broadcast_arrays(jnp.abs(self), jnp.abs(other))
    return lax.while_loop(is_left, divided, tuple(pair))[1]


@lowering("lcm", promote="result")
def lcm(self, other):
    divisor = gcd(self, other)
    quotient = lax.div(jnp.broadcast_to(self, divisor.shape), jnp.where(divisor == 0, 1, divisor))
    computed = jnp.promote_types(self.dtype, jnp.int32)  # as C computes with narrower ones
    return jnp.abs(quotient.astype(computed) * other.astype(computed)).astype(self.dtype)


lowering("heaviside", one_dtype=("self", "values"))(
    lambda self, values: jnp.where(self == 0, values, (self > 0).astype(values.dtype))
)


def _times_power_of_two(value, exponent):
    """Exact, where `jnp.exp2` is not: a third of the exponent at a time, so that no power overflows alone."""
    reach = jnp.finfo(value.dtype).maxexp * 3 // 4
    powers = jnp.asarray(2.0 ** np.arange(-reach, reach + 1), value.dtype)
    exponent = jnp.clip(exponent.astype(jnp.int64), -3 * reach, 3 * reach).astype(jnp.int32)
    for third in (exponent // 3, (exponent + 1) // 3, (exponent + 2) // 3):
        value = value * powers[third + reach]
    return value


@lowering("ldexp.Tensor")
def ldexp(self, other, *, out):
    if is_floating(self) and other.dtype == jnp.bool_:
        raise NotLoweredError("bools as exponents: PyTorch refuses them, in its own words on the CPU")
    dtype = opmath(out[0].dtype)
    if not jnp.issubdtype(other.dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.complexfloating):
        if (
            is_16_bit(other.dtype)
            and not is_16_bit(out[0].dtype)
            and not jnp.issubdtype(self.dtype, jnp.inexact)
        ):
            raise NotLoweredError("PyTorch's CPU has another dtype than its meta kernel")
        # A power of a real number is real: exp2 of a complex infinity is NaN.
        is_real = not jnp.iscomplexobj(other) and jnp.issubdtype(dtype, jnp.complexfloating)
        power = jnp.exp2(converted(other, jnp.finfo(dtype).dtype if is_real else dtype))
        return converted(self, dtype) * stored(power, out[0].dtype)
    if is_floating(self):
        return _times_power_of_two(self.astype(dtype), other)
    # PyTorch's is mul(self, pow(2, other)): an infinite power of 2 stays infinite.
    return converted(self, dtype) * _times_power_of_two(jnp.ones((), dtype), other)


@lowering("frexp.Tensor", promote="opmath", on_tpu=_NO_FLOAT64_BITS)
def frexp(self):
    return jnp.frexp(self)


@lowering("logaddexp", promote="result")
def logaddexp(self, other):
    if not jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jnp.logaddexp(self, other)
    # The imaginary part is not wrapped into (-pi, pi]: ATen/native/cpu/LogAddExp.h.
    smaller = self.real < other.real
    low, high = jnp.where(smaller, self, other), jnp.where(smaller, other, self)
    both_zero = jnp.isneginf(high.real)
    return jnp.where(both_zero, low, high + jnp.log1p(jnp.exp(low - jnp.where(both_zero, 0, high))))


# ---- comparisons

_COMPARISONS = {
    "eq": lambda self, other: self == other,
    "ne": lambda self, other: self != other,
    "lt": lambda self, other: self < other,
    "le": lambda self, other: self <= other,
    "gt": lambda self, other: self > other,
    "ge": lambda self, other: self >= other,
}
for _name, _function in _COMPARISONS.items():
    lowering(f"{_name}.Tensor", f"{_name}.Scalar", promote="inputs")(_function)

lowering("logical_and", promote="inputs")(lambda self, other: jnp.logical_and(self, other))
lowering("logical_or", promote="inputs")(lambda self, other: jnp.logical_or(self, other))
lowering("logical_xor", promote="inputs")(lambda self, other: jnp.logical_xor(self, other))

# ---- bits


def _left_shift(self: Any, other: Any) -> jax.Array:
    self, other = jnp.broadcast_arrays(self, other)
    return lax.shift_left(self, other)


def _right_shift(self: Any, other: Any) -> jax.Array:
    self, other = jnp.broadcast_arrays(self, other)
    if jnp.issubdtype(self.dtype, jnp.unsignedinteger):
        return lax.shift_right_logical(self, other)
    return lax.shift_right_arithmetic(self, other)


def _typed(function):
    """Both operands as arrays of one dtype: one of them may be a Python number."""

    def typed(self, other):
        dtype = self.dtype if isinstance(self, jax.Array) else other.dtype
        return function(jnp.asarray(self, dtype), jnp.asarray(other, dtype))

    return typed


_BITWISE = {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}
for _name, _function in _BITWISE.items():
    lowering(
        f"bitwise_{_name}.Tensor",
        f"bitwise_{_name}.Scalar",
        f"bitwise_{_name}.Scalar_Tensor",
        promote="result",
    )(_typed(_function))

for _name, _function in {"left": _left_shift, "right": _right_shift}.items():
    lowering(
        f"bitwise_{_name}_shift.Tensor",
        f"bitwise_{_name}_shift.Tensor_Scalar",
        f"bitwise_{_name}_shift.Scalar_Tensor",
        f"__{_name[0]}shift__.Tensor",
        f"__{_name[0]}shift__.Scalar",
        promote="result",
    )(_typed(_function))

# ---- copies and complex numbers


@lowering("complex")
def complex_(real, imag):
    if jnp.bfloat16 in (real.dtype, imag.dtype):
        raise NotLoweredError("bfloat16 has no complex numbers: PyTorch refuses it, in its own words")
    least = jnp.promote_types(real.dtype, jnp.float32)  # half complex numbers are computed in complex64
    return lax.complex(*jnp.broadcast_arrays(real.astype(least), imag.astype(least)))


@lowering("polar", one_dtype=("abs", "angle"))
def polar(abs, angle):
    return lax.complex(abs * jnp.cos(angle), abs * jnp.sin(angle))
