"""A program made longer: JAX's primitives on arrays of which only the first places along some dims count.

`Lengthened.run` evaluates a program that is known at two sizes for any size up to a bucket. What stands in
the places that do not count is never known: it is left where rows do not meet, and masked with the neutral
element where they do (a sum, a maximum, a product of matrices). A primitive without a rule may not touch a
dim that grows. That is the proof: what is not ruled raises NotPaddableError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from tpu_backend.padded.dims import (
    Dim,
    Examples,
    Grown,
    Linear,
    NotPaddableError,
    Number,
    grown,
    is_grown,
    regrouped,
    size_at,
)
from tpu_backend.padded.traced import parameters_of
from tpu_backend.runtime.target import target_platform


@dataclass(frozen=True)
class Padded:
    """An array as long as the bucket, and which of its places count."""

    array: Any
    dims: tuple[Dim, ...]
    alike: frozenset[int] = frozenset()
    """Axes along which all places hold the same: any of their places may count."""

    @property
    def grows(self) -> bool:
        return is_grown(self.dims)


class Equation:
    """One equation at both sizes, for a rule."""

    def __init__(self, examples: Examples, first: Any, second: Any):
        self.first, self.second = first, second
        self._examples = examples
        self.primitive = first.primitive

    def solved(self, first: Any, second: Any) -> Any:
        """A parameter, its numbers solved."""
        if isinstance(first, (tuple, list)):
            return tuple(self.solved(*pair) for pair in zip(first, second, strict=True))
        if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            return self._examples.solve(int(first), int(second))
        return first

    def parameter(self, name: str) -> Any:
        return self.solved(self.first.params[name], self.second.params[name])

    def fixed(self, name: str) -> Any:
        """A parameter that no size may change."""
        value = self.parameter(name)
        if any(isinstance(number, Linear) for number in jax.tree.leaves(value)):
            raise NotPaddableError(f"{name} of {self.primitive.name} grows")
        return value

    def shape(self, place: int = 0) -> tuple[Number, ...]:
        """The sizes of a result."""
        return self.solved(self.first.outvars[place].aval.shape, self.second.outvars[place].aval.shape)

    def input_shape(self, place: int) -> tuple[Number, ...]:
        return self.solved(self.first.invars[place].aval.shape, self.second.invars[place].aval.shape)

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same at both sizes, but for what it reads."""
        return all(
            each.aval.shape == other.aval.shape
            for each, other in zip(
                (*self.first.invars, *self.first.outvars),
                (*self.second.invars, *self.second.outvars),
                strict=True,
            )
        ) and parameters_of(self.first) == parameters_of(self.second)

    def bind(self, *operands: Any, **changed: Any) -> Any:
        """The primitive on these operands. What is not changed must be the same at both sizes."""
        if parameters_of(self.first, changed) != parameters_of(self.second, changed):
            raise NotPaddableError(f"{self.primitive.name} changes with the size")
        return self.primitive.bind(*operands, **self.primitive.get_bind_params(self.first.params | changed))


class Lengthened:
    """Evaluates programs at a bucket; `size` is the true T, an int64 scalar."""

    def __init__(self, examples: Examples, bucket: int, size: jax.Array):
        self.examples, self.bucket, self.size = examples, bucket, size
        self.largest = 0  # elements of an array that was made
        self.switches: dict[int, jax.Array] = {}  # by literal: what the program is told instead

    # ---- numbers and masks

    def runtime(self, number: Number) -> Any:
        """A number as the program computes it."""
        return number if isinstance(number, int) else number.slope * self.size + number.rest

    def length(self, dim: Dim) -> int:
        return size_at(dim, self.bucket)

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(self.length(dim) for dim in dims)

    def counts(self, value: Padded, axes: Sequence[int]) -> jax.Array | None:
        """Which places count along these axes, of a shape that broadcasts; None: all."""
        masks = []
        for axis in axes:
            dim = value.dims[axis]
            if not isinstance(dim, Grown):
                continue
            place = lax.iota(jnp.int64, self.length(dim))
            if dim.blocks > 1:
                place = place % dim.length.at(self.bucket)
            inside = place < self.runtime(dim.length)
            masks.append(lax.expand_dims(inside, [each for each in range(len(value.dims)) if each != axis]))
        result = None
        for mask in masks:
            result = mask if result is None else result & mask
        return result

    def masked(self, value: Padded, axes: Sequence[int], fill: Any) -> Any:
        """The array with `fill` wherever it does not count along these axes."""
        mask = self.counts(value, axes)
        if mask is None:
            return value.array
        filled = jnp.full((), fill, value.array.dtype)
        return jnp.where(mask, value.array, filled)

    # ---- evaluation

    def run(
        self, first: core.ClosedJaxpr, second: core.ClosedJaxpr, operands: Sequence[Padded]
    ) -> list[Padded]:
        """The results of a program that was traced at both sizes."""
        if len(first.consts) != len(second.consts):
            raise NotPaddableError("constants differ")
        constants = [self._constant(*pair) for pair in zip(first.consts, second.consts, strict=True)]
        return self._run(first.jaxpr, second.jaxpr, [*constants, *operands])

    def _run(self, first: core.Jaxpr, second: core.Jaxpr, operands: Sequence[Any]) -> list[Any]:
        known: dict[Any, Any] = {}

        def read(variable: Any, other: Any) -> Any:
            if isinstance(variable, core.Literal):
                return self._literal(variable, other)
            return known[variable]

        for variable, value in zip((*first.constvars, *first.invars), operands, strict=True):
            known[variable] = value
        for pair in zip(first.eqns, second.eqns, strict=True):
            equation = Equation(self.examples, *pair)
            values = [read(*each) for each in zip(pair[0].invars, pair[1].invars, strict=True)]
            for place, result in enumerate(self._evaluate(equation, values)):
                if isinstance(result, Padded):
                    self._check(result, equation, place)
                known[pair[0].outvars[place]] = result
        return [read(*each) for each in zip(first.outvars, second.outvars, strict=True)]

    def _check(self, result: Padded, equation: Equation, place: int) -> None:
        self.largest = max(self.largest, math.prod(result.array.shape))
        for size, variable in (
            (self.examples.first, equation.first.outvars[place]),
            (self.examples.second, equation.second.outvars[place]),
        ):
            if tuple(size_at(dim, size) for dim in result.dims) != variable.aval.shape:
                raise NotPaddableError(
                    f"{equation.primitive.name} gave {result.dims} for {variable.aval.shape}"
                )
        if result.array.shape != self.shape(result.dims):
            raise NotPaddableError(f"{equation.primitive.name} gave {result.array.shape} for {result.dims}")

    def _constant(self, first: Any, second: Any) -> Padded:
        number, other = np.asarray(first), np.asarray(second)
        if number.shape != other.shape or not np.array_equal(
            number, other, equal_nan=number.dtype.kind in "fc"
        ):
            raise NotPaddableError("a constant array differs")
        return Padded(first, number.shape)

    def _literal(self, first: Any, second: Any) -> Padded:
        if (switch := self.switches.get(id(first))) is not None:
            return Padded(switch, ())
        number, other = np.asarray(first.val).item(), np.asarray(second.val).item()
        dtype = first.aval.dtype
        if number == other or (number != number and other != other):
            return Padded(np.asarray(first.val, dtype), ())
        if int(number) != number or int(other) != other:
            raise NotPaddableError(f"{number} and {other} are no whole numbers")
        solved = self.examples.solve(int(number), int(other))
        return Padded(jnp.asarray(self.runtime(solved)).astype(dtype), ())

    def _evaluate(self, equation: Equation, values: Sequence[Any]) -> Sequence[Any]:
        name, params, others = equation.primitive.name, equation.first.params, equation.second.params
        if name == "platform_index":
            return [_branch_for_platform(params["platforms"])]
        if name == "cond" and isinstance(values[0], int):  # lax.platform_dependent
            chosen, other = params["branches"][values[0]], others["branches"][values[0]]
            return self.run(chosen, other, values[1:])
        for inner in ("jaxpr", "call_jaxpr"):
            if name in _CALLS and inner in params:
                called, other = params[inner], others[inner]
                if isinstance(called, core.Jaxpr):
                    return self._run(called, other, values)
                return self.run(called, other, values)
        if equation.is_fixed and not any(value.grows for value in values):
            results = equation.bind(*(value.array for value in values))
            results = results if equation.primitive.multiple_results else [results]
            return [Padded(result, tuple(result.shape)) for result in results]
        rule = RULES.get(name)
        if rule is None:
            raise NotPaddableError(f"{name} along a dim that grows")
        results = rule(self, equation, *values)
        return results if equation.primitive.multiple_results else [results]

    # ---- pieces along a dim

    def cut(self, value: Padded, axis: int, start: Number | jax.Array, dim: Dim) -> Any:
        """The places from `start` on, as many as `dim` has."""
        array, length = value.array, self.length(dim)
        known = start if isinstance(start, int) else None
        have = array.shape[axis]
        # A start at run time is within what counts; room behind it keeps XLA from moving it.
        needed = have + length if known is None else known + length
        if needed > have:
            pads = [(0, needed - have if each == axis else 0, 0) for each in range(array.ndim)]
            array = lax.pad(array, jnp.zeros((), array.dtype), pads)
        if known is not None:
            return lax.slice_in_dim(array, known, known + length, axis=axis)
        return lax.dynamic_slice_in_dim(array, self._start(start), length, axis)

    def put(self, array: Any, piece: Any, axis: int, start: Number | jax.Array) -> Any:
        """`array` with `piece` from `start` on along an axis; it fits."""
        return lax.dynamic_update_slice_in_dim(array, piece, self._start(start), axis)

    def _start(self, start: Number | jax.Array) -> Any:
        return jnp.asarray(self.runtime(start) if isinstance(start, (int, Linear)) else start, jnp.int64)

    def clamped(self, start: Any, dim: Dim, piece: Dim) -> Any:
        """A start at run time as XLA takes it: moved so that the piece fits what counts."""
        if (isinstance(dim, Grown) and dim.blocks > 1) or (isinstance(piece, Grown) and piece.blocks > 1):
            raise NotPaddableError("a slice of a dim in blocks")
        last = self.true_size(dim) - self.true_size(piece)
        return jnp.clip(jnp.asarray(start).astype(jnp.int64), 0, last)

    def true_size(self, dim: Dim) -> Any:
        return dim if isinstance(dim, int) else dim.blocks * self.runtime(dim.length)


_CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "checkpoint",
}


def _branch_for_platform(platforms: Any) -> int:
    """Which branch of `lax.platform_dependent` the target takes."""
    for place, names in enumerate(platforms):
        if names is None or target_platform() in names:
            return place
    raise NotPaddableError("no branch for this platform")


# ---- rules

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def _single(dim: Dim, what: str) -> None:
    if isinstance(dim, Grown) and dim.blocks > 1:
        raise NotPaddableError(f"{what} along a dim in blocks")


@_rule(
    *(
        "abs",
        "neg",
        "sign",
        "floor",
        "ceil",
        "round",
        "is_finite",
        "not",
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
    ),
    *("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh"),
    *("sqrt", "rsqrt", "cbrt", "square", "logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
    *("add", "sub", "mul", "div", "rem", "max", "min", "pow", "integer_pow", "atan2", "nextafter", "add_any"),
    *("and", "or", "xor", "eq", "ne", "lt", "le", "gt", "ge", "shift_left", "shift_right_logical"),
    *("shift_right_arithmetic", "population_count", "clz", "real", "imag", "complex", "conj"),
    *("convert_element_type", "reduce_precision", "copy", "copy_p", "stop_gradient", "select_n", "clamp"),
    *("name", "mulhi", "bessel_i0e", "bessel_i1e", "igamma", "igammac", "polygamma", "zeta"),
)
def _elementwise(self: Lengthened, equation: Equation, *values: Padded) -> Padded:
    shaped = [value for value in values if value.dims]  # a single number goes with all of them
    dims = tuple(_joint(shaped, axis) for axis in range(len(shaped[0].dims) if shaped else 0))
    arrays = [_laid_out(self, value, dims).array for value in values]
    alike = frozenset.intersection(*(value.alike for value in shaped)) if shaped else frozenset()
    return Padded(equation.bind(*arrays), dims, alike)


def _joint(values: Sequence[Padded], axis: int) -> Dim:
    """The dim that these broadcast to along an axis. One that is alike there has the dim of the others."""
    wide = {value.dims[axis] for value in values if value.dims[axis] != 1}
    told = {value.dims[axis] for value in values if axis not in value.alike} & wide
    if len(told) > 1 or (len(wide) > 1 and len({_growth(dim) for dim in wide}) > 1):
        raise NotPaddableError(f"dims that grow apart meet: {wide}")
    return next(iter(told or wide), 1)


def _growth(dim: Dim) -> Number:
    """How many places count."""
    if isinstance(dim, int):
        return dim
    return Linear(dim.blocks * dim.length.slope, dim.blocks * dim.length.rest)


def _laid_out(self: Lengthened, value: Padded, dims: tuple[Dim, ...]) -> Padded:
    """With these dims, where its own say otherwise of as many places that are alike."""
    for axis, (own, dim) in enumerate(zip(value.dims, dims, strict=False)):
        if own not in (1, dim):
            one = lax.slice_in_dim(value.array, 0, 1, axis=axis)
            shape = [*one.shape[:axis], self.length(dim), *one.shape[axis + 1 :]]
            value = replace(value, array=jnp.broadcast_to(one, shape))
    return value


@_rule("optimization_barrier")
def _barrier(self: Lengthened, equation: Equation, *values: Padded) -> list[Padded]:
    results = equation.bind(*(value.array for value in values))
    return [Padded(result, value.dims) for result, value in zip(results, values, strict=True)]


@_rule("iota")
def _iota(self: Lengthened, equation: Equation) -> Padded:
    dims = tuple(grown(number) for number in equation.shape())
    axis = equation.fixed("dimension")
    array = equation.bind(shape=self.shape(dims), dimension=axis)
    return Padded(array, dims, frozenset(range(len(dims))) - {axis})


@_rule("broadcast_in_dim")
def _broadcast(self: Lengthened, equation: Equation, value: Padded, *_: Padded) -> Padded:
    dims = [grown(number) for number in equation.parameter("shape")]
    places = equation.fixed("broadcast_dimensions")
    alike = set(range(len(dims)))
    for axis, (dim, size, place) in enumerate(zip(value.dims, equation.input_shape(0), places, strict=True)):
        if size == equation.shape()[place]:
            dims[place] = dim
            if axis not in value.alike:
                alike.remove(place)
        elif size != 1:
            raise NotPaddableError("a dim that grows is broadcast")
    return Padded(lax.broadcast_in_dim(value.array, self.shape(dims), places), tuple(dims), frozenset(alike))


@_rule("reshape")
def _reshape(self: Lengthened, equation: Equation, value: Padded, *_: Padded) -> Padded:
    if equation.first.params.get("dimensions") is not None:
        raise NotPaddableError("a reshape in another order")
    dims = regrouped(value.dims, equation.shape())
    return Padded(lax.reshape(value.array, self.shape(dims)), dims)


@_rule("squeeze")
def _squeeze(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    gone = equation.fixed("dimensions")
    dims = tuple(dim for axis, dim in enumerate(value.dims) if axis not in gone)
    if any(value.dims[axis] != 1 for axis in gone):
        raise NotPaddableError("a dim that grows is squeezed")
    return Padded(lax.squeeze(value.array, gone), dims)


@_rule("expand_dims")
def _expand(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    dims = regrouped(value.dims, equation.shape())
    return Padded(lax.reshape(value.array, self.shape(dims)), dims)


@_rule("transpose")
def _transpose(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    order = equation.fixed("permutation")
    return Padded(lax.transpose(value.array, order), tuple(value.dims[axis] for axis in order))


@_rule("rev")
def _reverse(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    axes = equation.fixed("dimensions")
    array = lax.rev(value.array, [axis for axis in axes if isinstance(value.dims[axis], int)])
    for axis in axes:
        dim = value.dims[axis]
        if isinstance(dim, Grown):  # the last place that counts comes first
            _single(dim, "a reversal")
            array = jnp.roll(lax.rev(array, [axis]), self.true_size(dim) - self.length(dim), axis)
    return Padded(array, value.dims)


# ---- where rows meet


def _least(dtype: Any) -> Any:
    return _extreme(dtype, least=True)


def _most(dtype: Any) -> Any:
    return _extreme(dtype, least=False)


def _extreme(dtype: Any, least: bool) -> Any:
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if least else np.inf
    if dtype == jnp.bool_:
        return not least
    info = jnp.iinfo(dtype)
    return info.min if least else info.max


_NEUTRAL: Mapping[str, Callable[[Any], Any]] = {
    "reduce_sum": lambda dtype: 0,
    "reduce_prod": lambda dtype: 1,
    "reduce_max": _least,
    "reduce_min": _most,
    "reduce_and": lambda dtype: True if dtype == jnp.bool_ else -1,
    "reduce_or": lambda dtype: 0,
    "reduce_xor": lambda dtype: 0,
    "argmax": _least,
    "argmin": _most,
    "cumsum": lambda dtype: 0,
    "cumprod": lambda dtype: 1,
    "cummax": _least,
    "cummin": _most,
    "cumlogsumexp": _least,
}


@_rule(*(name for name in _NEUTRAL if name.startswith("reduce_")))
def _reduce(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    axes = equation.fixed("axes")
    dims = tuple(dim for axis, dim in enumerate(value.dims) if axis not in axes)
    array = self.masked(value, axes, _NEUTRAL[equation.primitive.name](value.array.dtype))
    return Padded(equation.bind(array), dims)


@_rule("argmax", "argmin")
def _arg_reduce(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    (axis,) = equation.fixed("axes")
    _single(value.dims[axis], equation.primitive.name)
    dims = tuple(dim for each, dim in enumerate(value.dims) if each != axis)
    array = self.masked(value, [axis], _NEUTRAL[equation.primitive.name](value.array.dtype))
    return Padded(equation.bind(array), dims)


@_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def _cumulative(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    axis = equation.fixed("axis")
    _single(value.dims[axis], equation.primitive.name)
    array = value.array
    if equation.fixed("reverse"):  # else what does not count comes last
        array = self.masked(value, [axis], _NEUTRAL[equation.primitive.name](array.dtype))
    return Padded(equation.bind(array), value.dims)


@_rule("sort")
def _sort(self: Lengthened, equation: Equation, *values: Padded) -> list[Padded]:
    axis, keys = equation.fixed("dimension"), equation.fixed("num_keys")
    if len({value.dims for value in values}) != 1:
        raise NotPaddableError("arrays that grow apart are sorted")
    arrays = [value.array for value in values]
    if isinstance(values[0].dims[axis], Grown):
        if keys != 1 or not equation.fixed("is_stable"):
            raise NotPaddableError("a sort that is not stable, or by several keys")
        _single(values[0].dims[axis], "a sort")
        dtype = arrays[0].dtype  # NaN comes last, and what does not count stays behind its equals
        arrays[0] = self.masked(
            values[0], [axis], np.nan if jnp.issubdtype(dtype, jnp.floating) else _most(dtype)
        )
    return [Padded(result, value.dims) for result, value in zip(equation.bind(*arrays), values, strict=True)]


@_rule("top_k")
def _top_k(self: Lengthened, equation: Equation, value: Padded) -> list[Padded]:
    count = equation.fixed("k")
    axis = equation.first.params.get("axis", -1) % len(value.dims)
    _single(value.dims[axis], "top_k")
    array = self.masked(value, [axis], _least(value.array.dtype))  # of equals the first is taken
    dims = tuple(count if each == axis else dim for each, dim in enumerate(value.dims))
    return [Padded(result, dims) for result in equation.bind(array)]


@_rule("dot_general")
def _dot(self: Lengthened, equation: Equation, left: Padded, right: Padded) -> Padded:
    (contracted, other_contracted), (batch, other_batch) = equation.fixed("dimension_numbers")
    pairs = zip((*contracted, *batch), (*other_contracted, *other_batch), strict=True)
    if any(left.dims[axis] != right.dims[other] for axis, other in pairs):
        raise NotPaddableError("a product of dims that grow apart")
    free = [dim for axis, dim in enumerate(left.dims) if axis not in (*contracted, *batch)]
    free += [dim for axis, dim in enumerate(right.dims) if axis not in (*other_contracted, *other_batch)]
    dims = (*(left.dims[axis] for axis in batch), *free)
    # Both: 0 times what does not count may be NaN.
    arrays = self.masked(left, contracted, 0), self.masked(right, other_contracted, 0)
    return Padded(equation.bind(*arrays), dims)


# ---- pieces


@_rule("concatenate")
def _concatenate(self: Lengthened, equation: Equation, *values: Padded) -> Padded:
    axis = equation.fixed("dimension")
    rest = {value.dims[:axis] + value.dims[axis + 1 :] for value in values}
    if len(rest) != 1:
        raise NotPaddableError("arrays that grow apart are joined")
    total = Linear(0, 0)
    for value in values:
        _single(value.dims[axis], "a concatenation")
    dim = grown(equation.shape()[axis])
    dims = (*values[0].dims[:axis], dim, *values[0].dims[axis + 1 :])
    if isinstance(dim, int):
        return Padded(equation.bind(*(value.array for value in values)), dims)
    # Each begins where what counts of the one before ends, and covers what does not.
    result = jnp.zeros(self.shape(dims), values[0].array.dtype)
    for value in values:
        result = self.put(result, value.array, axis, total if total.slope else total.rest)
        piece = value.dims[axis]
        length = Linear(0, piece) if isinstance(piece, int) else piece.length
        total = Linear(total.slope + length.slope, total.rest + length.rest)
    return Padded(result, dims)


@_rule("stack")
def _stack(self: Lengthened, equation: Equation, *values: Padded) -> Padded:
    axis = equation.fixed("axis")
    if len({value.dims for value in values}) != 1:
        raise NotPaddableError("arrays that grow apart are stacked")
    dims = values[0].dims
    return Padded(
        equation.bind(*(value.array for value in values)), (*dims[:axis], len(values), *dims[axis:])
    )


@_rule("tile")
def _tile(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    times = equation.parameter("reps")
    dims = []
    for dim, number, size in zip(value.dims, times, equation.shape(), strict=True):
        if isinstance(dim, int):
            dims.append(grown(size))
        elif isinstance(number, int):  # what does not count is repeated, too: it parts the blocks
            dims.append(replace(dim, blocks=dim.blocks * number))
        else:
            raise NotPaddableError("a dim that grows is repeated as often as it is long")
    return Padded(
        equation.bind(value.array, reps=tuple(size_at(grown(n), self.bucket) for n in times)), tuple(dims)
    )


@_rule("conv_general_dilated")
def _convolve(self: Lengthened, equation: Equation, value: Padded, kernel: Padded) -> Padded:
    """Along a batch, and along what it slides over: what does not count is zero there, as behind the end."""
    places = equation.first.params["dimension_numbers"]
    if kernel.grows or equation.fixed("batch_group_count") != 1:
        raise NotPaddableError("the kernel of a convolution grows, or its batch is in groups")
    batch, features, *slides = places.lhs_spec
    for axis in (features, *slides):
        if axis == features and isinstance(value.dims[axis], Grown):
            raise NotPaddableError("the features of a convolution grow")
        _single(value.dims[axis], "a convolution")
    dims = [grown(size) for size in equation.shape()]
    dims[places.out_spec[0]] = value.dims[batch]
    return Padded(equation.bind(self.masked(value, slides, 0), kernel.array), tuple(dims))


@_rule("split")
def _split(self: Lengthened, equation: Equation, value: Padded) -> list[Padded]:
    axis, sizes = equation.fixed("axis"), equation.fixed("sizes")
    if isinstance(value.dims[axis], Grown):
        raise NotPaddableError("a dim that grows is split")
    results = equation.bind(value.array, sizes=sizes)
    return [
        Padded(result, (*value.dims[:axis], size, *value.dims[axis + 1 :]))
        for result, size in zip(results, sizes, strict=True)
    ]


@_rule("slice")
def _slice(self: Lengthened, equation: Equation, value: Padded) -> Padded:
    starts = equation.parameter("start_indices")
    strides = equation.fixed("strides") if equation.first.params["strides"] else (1,) * len(starts)
    array, dims = value.array, list(value.dims)
    for axis, (start, stride) in enumerate(zip(starts, strides, strict=True)):
        size, wanted = equation.input_shape(0)[axis], equation.shape()[axis]
        if start == 0 and size == wanted and stride == 1:
            continue
        _single(dims[axis], "a slice")
        if stride == 1:
            piece = grown(wanted)
            array = self.cut(Padded(array, tuple(dims)), axis, start, piece)
            dims[axis] = piece
            continue
        limit = equation.parameter("limit_indices")[axis]
        if isinstance(size, Linear) or isinstance(start, Linear) or isinstance(limit, Linear):
            raise NotPaddableError("every so many places of a dim that grows")
        array = lax.slice_in_dim(array, start, limit, stride, axis)
        assert isinstance(wanted, int), "of what does not grow"
        dims[axis] = wanted
    return Padded(array, tuple(dims))


@_rule("dynamic_slice")
def _dynamic_slice(self: Lengthened, equation: Equation, value: Padded, *starts: Padded) -> Padded:
    array, dims = value.array, list(value.dims)
    for axis, (size, wanted) in enumerate(
        zip(equation.input_shape(0), equation.parameter("slice_sizes"), strict=True)
    ):
        if size == wanted:  # XLA moves the start to 0
            continue
        piece = grown(wanted)
        start = self.clamped(starts[axis].array, dims[axis], piece)
        array = self.cut(Padded(array, tuple(dims)), axis, start, piece)
        dims[axis] = piece
    return Padded(array, tuple(dims))


@_rule("dynamic_update_slice")
def _dynamic_update_slice(
    self: Lengthened, equation: Equation, value: Padded, update: Padded, *starts: Padded
) -> Padded:
    places = []
    for dim, piece, start in zip(value.dims, update.dims, starts, strict=True):
        if dim == piece:
            places.append(jnp.zeros((), jnp.int64))
        elif isinstance(piece, Grown):
            raise NotPaddableError("what grows is written to a part of a dim")
        else:
            places.append(self.clamped(start.array, dim, piece).astype(jnp.int64))
    return Padded(lax.dynamic_update_slice(value.array, update.array, places), value.dims)


@_rule("pad")
def _pad(self: Lengthened, equation: Equation, value: Padded, filler: Padded) -> Padded:
    array, dims = value.array, list(value.dims)
    for axis, (low, high, interior) in enumerate(equation.parameter("padding_config")):
        if (low, high, interior) == (0, 0, 0):
            continue
        dim, wanted = dims[axis], equation.shape()[axis]
        if isinstance(dim, int) and isinstance(wanted, int):
            if not isinstance(low, int) or not isinstance(high, int):
                raise NotPaddableError("a dim that does not grow is padded by what does")
            config = [(low, high, interior) if each == axis else (0, 0, 0) for each in range(array.ndim)]
            array = lax.pad(array, filler.array, config)
            dims[axis] = wanted
            continue
        if interior != 0 or not isinstance(low, int):
            raise NotPaddableError("a dim that grows is padded inside")
        _single(dim, "padding")
        mask = self.counts(Padded(array, tuple(dims)), [axis])
        if mask is not None:
            array = jnp.where(mask, array, filler.array)
        piece = grown(wanted)
        above = self.length(piece) - low - array.shape[axis]
        config = [(low, above, 0) if each == axis else (0, 0, 0) for each in range(array.ndim)]
        array = lax.pad(array, filler.array, config)
        dims[axis] = piece
    return Padded(array, tuple(dims))


# What holds of indices that count need not hold of the others.
_IN_NO_ORDER = {"indices_are_sorted": False, "unique_indices": False}


@_rule("gather")
def _gather(self: Lengthened, equation: Equation, value: Padded, indices: Padded) -> Padded:
    numbers = equation.first.params["dimension_numbers"]
    if numbers != equation.second.params["dimension_numbers"]:
        raise NotPaddableError("a gather that changes with the size")
    if isinstance(indices.dims[-1], Grown):
        raise NotPaddableError("a gather by vectors that grow")
    mode, wanted = equation.first.params["mode"], equation.parameter("slice_sizes")
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    sizes, offsets, starts = [], [], jnp.asarray(indices.array)
    for axis, (dim, number) in enumerate(zip(value.dims, wanted, strict=True)):
        if axis in batching:
            if dim != indices.dims[batching[axis]]:
                raise NotPaddableError("a gather along dims that grow apart")
            sizes.append(1)
            continue
        if axis in numbers.collapsed_slice_dims:
            sizes.append(1)
            if isinstance(dim, Grown) and mode != lax.GatherScatterMode.PROMISE_IN_BOUNDS:
                _single(dim, "a gather")
                if mode != lax.GatherScatterMode.CLIP:
                    raise NotPaddableError("a gather that fills what is outside")
                place = numbers.start_index_map.index(axis)
                last = (self.true_size(dim) - 1).astype(starts.dtype)
                starts = starts.at[..., place].set(jnp.clip(starts[..., place], 0, last))
            elif isinstance(dim, Grown):
                _single(dim, "a gather")
            continue
        if number != equation.input_shape(0)[axis]:
            if isinstance(dim, Grown) or isinstance(number, Linear):
                raise NotPaddableError("a gather of a part of a dim that grows")
            sizes.append(number)
            offsets.append(number)
            continue
        sizes.append(self.length(dim))
        offsets.append(dim)
    batch = iter(indices.dims[:-1])
    rest = iter(offsets)
    rank = len(indices.dims) - 1 + len(offsets)
    dims = tuple(next(rest) if axis in numbers.offset_dims else next(batch) for axis in range(rank))
    return Padded(equation.bind(value.array, starts, slice_sizes=tuple(sizes), **_IN_NO_ORDER), dims)
