"""A recorded segment as a function over JAX arrays.

The C++ recorder hands over a tape: for each entry a signature id and the local numbers of the values it
reads. Signatures are decoded once; a segment is then replayed through the lowering table inside `jax.jit`.
This is the cold path: it runs on a program-cache miss only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpu_backend import _C, views
from tpu_backend.lowering import registry
from tpu_backend.reinterpret import reinterpret
from tpu_backend.runtime.dtypes import TORCH_DTYPES, jax_dtype
from tpu_backend.runtime.user_line import user_line


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: which slot of its buffer it shows."""

    reads: bool  # whether the entry has a link for it
    base_dims: tuple[int, ...]
    base_dtype: int
    geometry: views.Geometry | None  # None: the buffer itself
    has_offset: bool  # its offset is among the segment's
    dtype: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class RuntimeArg:
    """A number that is an input of the program."""

    is_integer: bool
    dtype: int
    wrapped: bool


@dataclass(frozen=True)
class ConstantArg:
    value: Any


@dataclass(frozen=True)
class ListArg:
    items: tuple[Any, ...]


@dataclass(frozen=True)
class Argument:
    name: str
    kwarg_only: bool
    is_out: bool
    value: Any


@dataclass(frozen=True)
class Output:
    written_arg: int  # -1: a new tensor
    element: int  # of a list; -1 outside one
    undefined: bool  # not computed (an output_mask entry that is false)
    partial: bool
    skip: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: int
    layout_dims: tuple[int, ...]  # of the buffer's value
    layout_dtype: int
    computed: jax.ShapeDtypeStruct | None


@dataclass(frozen=True)
class Signature:
    """One form of one op, decoded."""

    overload: str
    name: str
    arguments: tuple[Argument, ...]
    outputs: tuple[Output, ...]
    wide: bool
    random: bool
    compute_dtype: Any

    def described(self) -> str:
        """The call with its tensors: ``aten::mm(self=float32[2, 3], mat2=float32[3, 4])``."""
        tensors = [
            f"{argument.name}={str(TORCH_DTYPES[leaf.dtype]).removeprefix('torch.')}{list(leaf.sizes)}"
            for argument in self.arguments
            for leaf in _leaves(argument.value)
            if isinstance(leaf, TensorArg)
        ]
        return f"{self.overload}({', '.join(tensors)})"


def _decode(item: tuple[Any, ...], schema_type: str) -> Any:
    kind = item[0]
    if kind == "none":
        return ConstantArg(None)
    if kind == "constant":
        value = item[1]
        if schema_type.startswith(("ScalarType", "Optional[ScalarType]")) or schema_type == "ScalarType?":
            value = TORCH_DTYPES[value]
        return ConstantArg(value)
    if kind == "runtime":
        return RuntimeArg(item[1], item[2], item[3])
    if kind == "list":
        return ListArg(tuple(_decode(part, schema_type) for part in item[1]))
    _, reads, dims, base_dtype, sizes, strides, dtype, form = item
    dims = tuple(dims)
    if form == "whole":
        return TensorArg(reads, dims, base_dtype, None, False, dtype, dims)
    geometry = views.Geometry(tuple(sizes), tuple(strides), 0, jax_dtype(dtype))
    return TensorArg(reads, dims, base_dtype, geometry, form != "dense", dtype, tuple(sizes))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, ListArg):
        for item in value.items:
            yield from _leaves(item)
    else:
        yield value


def _result_type(arguments: Sequence[Argument]) -> Any:
    """``torch.result_type`` over the tensor and number arguments, by PyTorch's own rules."""
    dtype: Any = None
    seen: list[torch.Tensor | float | int | bool | complex] = []
    for argument in arguments:
        if argument.is_out:
            continue
        for leaf in _leaves(argument.value):
            if isinstance(leaf, TensorArg):
                seen.append(torch.empty((1,) * len(leaf.sizes), dtype=TORCH_DTYPES[leaf.dtype]))
            elif isinstance(leaf, RuntimeArg):
                if leaf.wrapped:
                    seen.append(
                        (TORCH_DTYPES[leaf.dtype].is_floating_point and 1.0)
                        or (leaf.dtype != 11 and 1)
                        or True
                    )
                else:
                    seen.append(torch.empty((), dtype=TORCH_DTYPES[leaf.dtype]))
            elif isinstance(leaf, ConstantArg) and isinstance(leaf.value, (float, complex)):
                seen.append(leaf.value)
    if not seen:
        return None
    dtype = torch.result_type(seen[0], seen[0])
    tensors = [item for item in seen if isinstance(item, torch.Tensor)]
    numbers = [item for item in seen if not isinstance(item, torch.Tensor)]
    if not tensors:
        return jax_dtype(dtype)
    total = tensors[0]
    for item in [*tensors[1:], *numbers]:
        promoted = torch.result_type(total, item)
        dims = max(total.dim(), item.dim() if isinstance(item, torch.Tensor) else 0)
        total = torch.empty((1,) * dims, dtype=promoted)
    return jax_dtype(total.dtype)


def _output(item: dict[str, Any]) -> Output:
    if item["undefined"]:
        return Output(-1, item["element"], True, False, True, (), (), 0, (), 0, None)
    return Output(
        item["written_arg"],
        item["element"],
        False,
        item["partial"],
        item["skip"],
        tuple(item["sizes"]),
        tuple(item["strides"]),
        item["dtype"],
        tuple(item["layout_dims"]),
        item["layout_dtype"],
        jax.ShapeDtypeStruct(tuple(item["computed_sizes"]), jax_dtype(item["computed_dtype"])),
    )


@cache
def signature(number: int) -> Signature:
    """The decoded signature with this id."""
    raw = _C.describe_signature(number)
    if raw["name"] in ("zeros", "resize") and raw["overload"] == raw["name"]:
        arguments = tuple(
            Argument("source", False, False, _decode(item, "Tensor")) for item in raw["arguments"]
        )
    else:
        arguments = tuple(
            Argument(name, kwarg_only, is_out, _decode(value, schema_type))
            for name, kwarg_only, is_out, schema_type, value in raw["arguments"]
        )
    outputs = tuple(_output(item) for item in raw["outputs"])
    return Signature(
        raw["overload"], raw["name"], arguments, outputs, raw["wide"], raw["random"], _result_type(arguments)
    )


class Numbers:
    """The program inputs that are not tensors, taken in the order in which they were recorded."""

    def __init__(self, floats: Any, doubles: Any, integers: Any, offsets: Sequence[Any]):
        self._floats, self._doubles, self._integers = floats, doubles, integers
        self._offsets = iter(offsets)
        self._next_float = self._next_double = self._next_integer = 0

    def offset(self) -> Any:
        return next(self._offsets)

    def integer(self) -> Any:
        self._next_integer += 1
        return self._integers[self._next_integer - 1]

    def real(self, wide: bool) -> Any:
        if wide:
            self._next_double += 1
            return self._doubles[self._next_double - 1]
        self._next_float += 1
        return self._floats[self._next_float - 1]


def _view(argument: TensorArg, offset: Any) -> tuple[views.Geometry, Any]:
    """The geometry to resolve and the traced offset, or None where the offset is a constant."""
    assert argument.geometry is not None
    if offset is None:
        return argument.geometry, None
    if isinstance(offset, int):
        return (
            views.Geometry(
                argument.geometry.sizes, argument.geometry.strides, offset, argument.geometry.dtype
            ),
            None,
        )
    example, traced = offset
    return (
        views.Geometry(argument.geometry.sizes, argument.geometry.strides, example, argument.geometry.dtype),
        traced,
    )


def replay(
    entry: Signature, links: Iterator[int], values: dict[int, jax.Array], numbers: Numbers
) -> list[jax.Array]:
    """Run one entry on the values so far; returns the new value of each output that is not skipped."""
    written_views: dict[tuple[int, int], tuple[views.Geometry, Any]] = {}

    def evaluate(value: Any, position: int, element: int = -1) -> Any:
        if isinstance(value, ConstantArg):
            return value.value
        if isinstance(value, RuntimeArg):
            return numbers.integer() if value.is_integer else numbers.real(entry.wide)
        if isinstance(value, ListArg):
            return [evaluate(item, position, i) for i, item in enumerate(value.items)]
        geometry = traced = None
        if value.geometry is not None:
            geometry, traced = _view(value, numbers.offset() if value.has_offset else None)
            written_views[position, element] = (geometry, traced)
        if not value.reads:
            return None
        base = values[next(links)]
        return base if geometry is None else views.read(base, geometry, traced)

    evaluated = [(argument, evaluate(argument.value, i)) for i, argument in enumerate(entry.arguments)]
    first = entry.outputs[0]
    if entry.overload == "zeros":
        return [jnp.zeros(first.layout_dims, jax_dtype(first.layout_dtype))]
    if entry.overload == "resize":
        return [_resize(evaluated[0][1], first.layout_dims[0])]

    args = [value for argument, value in evaluated if not argument.is_out and not argument.kwarg_only]
    kwargs = {
        argument.name: value
        for argument, value in evaluated
        if not argument.is_out and argument.kwarg_only and argument.name not in _DROPPED
    }
    key = None
    if entry.random:
        key = _key(numbers.integer(), numbers.integer())
    lowering = registry.TABLE[entry.name]
    results = registry.apply(
        lowering, args, kwargs, tuple(o.computed for o in entry.outputs), entry.compute_dtype, key
    )
    new_values = []
    for output, result in zip(entry.outputs, results, strict=True):
        if output.skip or result is None:
            continue
        value = result.astype(jax_dtype(output.dtype))
        if value.shape != output.sizes:
            value = jnp.broadcast_to(value, output.sizes)
        if output.partial:
            base = values[next(links)]
            geometry, traced = written_views[output.written_arg, output.element]
            new_values.append(views.write(base, geometry, value, traced))
            continue
        order = views.memory_order(output.sizes, output.strides)
        assert order is not None
        new_values.append(value if order == tuple(range(len(order))) else value.transpose(order))
    return new_values


def is_lowered(number: int) -> bool:
    """Whether the lowering can express this form of an op: it is traced once, on shapes alone.

    Raises RuntimeError with the op, its shapes and the Python line when the lowering fails: it names a bug
    where it is met, not where the segment is cut.
    """
    entry = signature(number)
    shapes = [
        jax.ShapeDtypeStruct(leaf.base_dims, jax_dtype(leaf.base_dtype))
        for argument in entry.arguments
        for leaf in _leaves(argument.value)
        if isinstance(leaf, TensorArg) and leaf.reads
    ]
    partial = [output for output in entry.outputs if output.partial and not output.skip]
    shapes += [jax.ShapeDtypeStruct(output.layout_dims, jax_dtype(output.layout_dtype)) for output in partial]

    def trace(*bases: jax.Array) -> list[jax.Array]:
        many = 2 + sum(1 for argument in entry.arguments for _ in _leaves(argument.value))
        numbers = Numbers(
            jnp.zeros(many, jnp.float32), jnp.zeros(many, jnp.float64), jnp.zeros(many, jnp.int64), [0] * many
        )
        return replay(entry, iter(range(len(bases))), dict(enumerate(bases)), numbers)

    try:
        with jax.enable_x64(True):
            jax.eval_shape(trace, *shapes)
    except registry.NotLoweredError:
        return False
    except Exception as error:
        raise RuntimeError(
            f"the lowering of {entry.described()} failed at {user_line()}: {type(error).__name__}: {error}"
        ) from error
    return True


def _resize(base: jax.Array, num_bytes: int) -> jax.Array:
    """The leading bytes of a buffer, zeros behind them."""
    data = reinterpret(base, np.dtype(np.uint8)).reshape(-1)[:num_bytes]
    return jnp.pad(data, (0, num_bytes - data.size))


# Keyword arguments of ATen schemas that say where and how, not what.
_DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format"})


def _key(seed: jax.Array, offset: jax.Array) -> jax.Array:
    """The PRNG key of one draw: Threefry of (seed, offset), 64 bits each."""
    key = jax.random.wrap_key_data(
        jnp.stack([(seed >> 32).astype(jnp.uint32), seed.astype(jnp.uint32)]), impl="threefry2x32"
    )
    key = jax.random.fold_in(key, (offset >> 32).astype(jnp.uint32))
    return jax.random.fold_in(key, offset.astype(jnp.uint32))


def segment_function(description: dict[str, Any]) -> Any:
    """The pure function of a segment: input arrays, then packed floats, doubles, integers -> outputs."""
    tape: list[int] = description["tape"]
    inputs: list[int] = description["inputs"]
    outputs: list[int] = description["outputs"]
    offset_examples: list[int] = description["offsets"]
    offset_is_input: list[bool] = description["offset_is_input"]
    num_integers: int = description["num_integers"]
    packs = [description["num_floats"] > 0, description["num_doubles"] > 0]
    has_integers = num_integers > 0 or any(offset_is_input)

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        values = dict(zip(inputs, arguments))
        rest = iter(arguments[len(inputs) :])
        floats = next(rest) if packs[0] else None
        doubles = next(rest) if packs[1] else None
        integers = next(rest) if has_integers else None
        dynamic = num_integers
        offsets: list[Any] = []
        for example, is_input in zip(offset_examples, offset_is_input, strict=True):
            if is_input:
                offsets.append((example, integers[dynamic]))  # type: ignore[index]
                dynamic += 1
            else:
                offsets.append(example)
        numbers = Numbers(floats, doubles, integers, offsets)
        taken = set(inputs)
        fresh = (local for local in itertools.count() if local not in taken)  # numbers of values made here
        for entry, links in entries(tape):
            for value in replay(entry, iter(links), values, numbers):
                values[next(fresh)] = value
        return tuple(values[output] for output in outputs)

    return run


@cache
def _num_links(number: int) -> int:
    entry = signature(number)
    reads = sum(
        isinstance(leaf, TensorArg) and leaf.reads
        for argument in entry.arguments
        for leaf in _leaves(argument.value)
    )
    return reads + sum(output.partial and not output.skip for output in entry.outputs)


def entries(tape: Sequence[int]) -> Iterator[tuple[Signature, Sequence[int]]]:
    """The entries of a tape: each signature with the numbers of the values it reads.  The first word is a
    setting.
    """
    at = 1
    while at < len(tape):
        end = at + 1 + _num_links(tape[at])
        yield signature(tape[at]), tape[at + 1 : end]
        at = end
