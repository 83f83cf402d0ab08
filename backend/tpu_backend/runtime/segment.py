"""A recorded segment as a function over JAX arrays, replayed through the lowering table inside `jax.jit`.

This is the cold path: it runs on a program-cache miss only.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from tpu_backend import _C, views
from tpu_backend.complex_half import decode, encode
from tpu_backend.lowering import registry
from tpu_backend.lowering.answers import ALWAYS, Answer
from tpu_backend.lowering.bounds import BoundsCheck, collect_bounds_checks
from tpu_backend.lowering.collectives import axis_of
from tpu_backend.lowering.settings import recorded_settings
from tpu_backend.reinterpret import reinterpret
from tpu_backend.runtime import gathers, known_forms, packed
from tpu_backend.runtime.dtypes import TORCH_DTYPES, lowered_dtype, stored_dtype
from tpu_backend.runtime.lists import with_unlike_elements
from tpu_backend.runtime.program_key import settled_by_version
from tpu_backend.runtime.signature import (
    ConstantArg,
    ListArg,
    RepeatedArg,
    RuntimeArg,
    Signature,
    TensorArg,
    entries,
    precision_readers,
    summary,
)
from tpu_backend.runtime.target import target_platform
from tpu_backend.runtime.user_line import first_line, remember_first_line, user_line


class Numbers:
    """The program inputs that are not tensors, taken in the order in which they were recorded."""

    def __init__(
        self, floats: Iterator[Any], doubles: Iterator[Any], integers: Iterator[Any], offsets: Iterable[Any]
    ):
        self._floats, self._doubles, self._integers = floats, doubles, integers
        self._offsets = iter(offsets)

    def offset(self) -> Any:
        return next(self._offsets)

    def integer(self) -> Any:
        return next(self._integers)

    def real(self, wide: bool) -> Any:
        return next(self._doubles if wide else self._floats)


def _each(array: Any) -> Iterator[Any]:
    """The elements of a packed array one by one; iterating over it would unpack all of it at once."""
    return (array[i] for i in itertools.count())


def _view(argument: TensorArg, offset: Any) -> tuple[views.Geometry, Any]:
    """The geometry to resolve and the traced offset, or None where the offset is a constant."""
    assert argument.geometry is not None
    if offset is None:
        return argument.geometry, None
    example, traced = (offset, None) if isinstance(offset, int) else offset
    return replace(argument.geometry, offset=example), traced


def replay(
    entry: Signature, links: Iterator[int], values: Mapping[int, packed.Value], numbers: Numbers
) -> list[packed.Value]:
    """Run one entry on the values so far; returns the new value of each output that is not skipped."""
    written_views: dict[tuple[int, int], tuple[views.Geometry, Any]] = {}

    def evaluate(value: Any, position: int, element: int = -1) -> Any:
        if isinstance(value, ConstantArg):
            return value.value
        if isinstance(value, RuntimeArg):
            return numbers.integer() if value.is_integer else numbers.real(entry.wide)
        if isinstance(value, RepeatedArg):
            return [evaluate(value.item, position)] * value.length
        if isinstance(value, ListArg):
            return [evaluate(item, position, i) for i, item in enumerate(value.items)]
        geometry = traced = None
        if value.geometry is not None:
            geometry, traced = _view(value, numbers.offset() if value.has_offset else None)
            written_views[position, element] = (geometry, traced)
        if not value.reads:
            return None
        array = packed.read(values[next(links)], geometry, traced)
        if isinstance(array, packed.Packed) and array.is_of(value.dtype):
            return array  # nothing is encoded
        return decode(packed.whole(array), TORCH_DTYPES[value.dtype])

    evaluated = [(argument, evaluate(argument.value, i)) for i, argument in enumerate(entry.arguments)]
    first = entry.outputs[0]
    if entry.overload == "zeros":
        return [packed.zeros(first.layout_dims, stored_dtype(first.layout_dtype))]
    if entry.overload == "resize":
        return [_resize(packed.whole(evaluated[0][1]), first.layout_dims[0])]

    args = [value for argument, value in evaluated if not argument.is_out and not argument.kwarg_only]
    kwargs = {
        argument.name: value
        for argument, value in evaluated
        if not argument.is_out and argument.kwarg_only and argument.name not in _DROPPED
    }
    if (of_parts := packed.apply(entry, args, kwargs)) is not None:
        if not first.partial:
            return [of_parts]
        base = values[next(links)]
        geometry, traced = written_views[first.written_arg, first.element]
        return [packed.write(base, geometry, of_parts, traced)]
    args = packed.whole(args)
    kwargs = {name: packed.whole(value) for name, value in kwargs.items()}
    lowering, key = registry.TABLE[entry.name], None
    if entry.random:
        seed, offset = numbers.integer(), numbers.integer()
        key = _key(seed, offset)
        if lowering.draws > 1:
            key = jnp.stack([key, *(_key(seed, offset + number) for number in range(1, lowering.draws))])
    results = registry.apply(
        lowering, args, kwargs, tuple(o.computed for o in entry.outputs), entry.compute_dtype, key
    )
    new_values: list[packed.Value] = []
    writes: dict[int, list[tuple[int, packed.Write]]] = defaultdict(list)  # by base: place of the output
    for output, result in zip(entry.outputs, results, strict=True):
        if output.skip or result is None:
            continue
        value = encode(registry.converted(result, lowered_dtype(output.dtype)), TORCH_DTYPES[output.dtype])
        if value.shape != output.sizes:
            value = jnp.broadcast_to(value, output.sizes)
        if output.partial:
            geometry, traced = written_views[output.written_arg, output.element]
            writes[next(links)].append((len(new_values), packed.Write(geometry, value, traced)))
            new_values.append(value)  # until all parts of its base are there
            continue
        order = _C.memory_order(output.sizes, output.strides)
        assert order is not None
        new_values.append(value if order == tuple(range(len(order))) else value.transpose(order))
    for link, of_base in writes.items():
        written = packed.write_all(values[link], [write for _, write in of_base])
        for place, _ in of_base:
            new_values[place] = written
    return new_values


def number_dtypes(entry: Signature) -> list[str]:
    """The dtypes of its runtime numbers, in the order in which a replay takes them."""
    real = "float64" if entry.wide else "float32"
    dtypes = [
        "int64" if leaf.is_integer else real
        for _, leaf in entry.named_leaves()
        if isinstance(leaf, RuntimeArg)
    ]
    return dtypes + ["int64", "int64"] * entry.random


def num_offsets(entry: Signature) -> int:
    return sum(tensor.has_offset for tensor in entry.tensors())


class EntryTrace(NamedTuple):
    """One entry: it takes the values that it reads, its runtime numbers, then the offsets that are inputs."""

    jaxpr: core.ClosedJaxpr
    bounds_checks: tuple[BoundsCheck, ...]  # what was out of range are its last outputs
    reads_precision: bool  # PyTorch's setting for matrix products


def trace_entry(
    entry: Signature, offsets: Sequence[tuple[int, bool]], precision: int | None = None
) -> EntryTrace:
    """One entry on shapes alone; of its offsets those marked are inputs. Precision is PyTorch's setting now
    unless it is given.
    """
    precision = _C.matmul_precision() if precision is None else precision
    bases = [
        jax.ShapeDtypeStruct(tensor.base_dims, stored_dtype(tensor.base_dtype))
        for tensor in entry.tensors()
        if tensor.reads
    ]
    bases += [
        jax.ShapeDtypeStruct(output.layout_dims, stored_dtype(output.layout_dtype))
        for output in entry.outputs
        if output.partial and not output.skip
    ]
    numbers = [jax.ShapeDtypeStruct((), dtype) for dtype in number_dtypes(entry)]
    starts = [jax.ShapeDtypeStruct((), "int64") for _, is_input in offsets if is_input]
    bounds_checks: list[BoundsCheck] = []

    def function(*arguments: jax.Array) -> list[jax.Array]:
        values = dict(enumerate(arguments[: len(bases)]))
        given = iter(arguments[len(bases) : len(bases) + len(numbers)])
        inputs = iter(arguments[len(bases) + len(numbers) :])
        places = [(offset, next(inputs)) if is_input else offset for offset, is_input in offsets]
        with collect_bounds_checks() as collected:
            results = replay(entry, iter(range(len(bases))), values, Numbers(given, given, given, places))
        bounds_checks[:] = collected.made
        return [*packed.whole(results), *collected.out_of_range]

    ranks = entry.ranks
    in_group = nullcontext() if ranks is None else axis_of(ranks)
    with jax.enable_x64(True), in_group, recorded_settings(precision) as settings:
        jaxpr = jax.make_jaxpr(function)(*bases, *numbers, *starts)
    return EntryTrace(jaxpr, tuple(bounds_checks), settings.was_read)


_NOT_LOWERED = Answer(is_lowered=False, has_bounds_checks=False, reads_precision=False)

# What tracing raises for the form itself: it would raise it again. All else may pass (no memory, a file that
# is not there, an interrupted connection), and so may whatever a function of the user's raises.
_FINAL = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    TypeError,
    ValueError,
)


class LoweringError(RuntimeError):
    """The lowering of a form has failed; `is_final`: it would fail again."""

    def __init__(self, message: str, is_final: bool):
        super().__init__(message)
        self.is_final = is_final


def trace_form(number: int) -> Answer:
    """Whether the lowering can express this form of an op; if so, whether it has bounds checks,
    and whether it reads PyTorch's matrix product precision.  It is traced once, on shapes
    alone, unless an earlier process did.  On a real TPU its compiler must take it as well.

    Raises LoweringError with the op, its shapes and the Python line when the lowering fails: on wrong
    arguments, or a bug, named where it is met and not where the segment is cut.
    """
    remember_first_line(number)
    form = summary(number)
    answer = known_forms.recall(form)
    if answer is None:
        answer = _traced(with_unlike_elements(form.signature))
        known_forms.learn(form, answer)
    if answer.reads_precision:
        precision_readers.add(number)
    return answer


def _traced(entry: Signature) -> Answer:
    if _is_refused(entry) or (target_platform() == "tpu" and not _compiles_on_tpu(entry)):
        return _NOT_LOWERED
    if (answer := ALWAYS.get(entry.name)) is not None and not any(
        0 in each.sizes for each in entry.tensors()
    ):
        return answer
    try:
        traced = trace_entry(entry, [(0, False)] * num_offsets(entry))
    except registry.NotLoweredError:
        return _NOT_LOWERED
    except Exception as error:
        raise _failure(entry, user_line(), error) from error
    return Answer(True, bool(traced.bounds_checks), traced.reads_precision)


def _failure(entry: Signature, line: str, error: Exception) -> LoweringError:
    return LoweringError(
        f"the lowering of {entry.described()} failed at {line}: {type(error).__name__}: {error}",
        is_final=isinstance(error, _FINAL) and settled_by_version(entry.name),
    )


def _is_refused(entry: Signature) -> bool:
    """Whether PyTorch takes no such dtypes together, which the CPU's kernel will tell."""
    if (lowering := registry.TABLE.get(entry.name)) is None:
        return False
    dtypes = {
        argument.name: lowered_dtype(argument.value.dtype)
        for argument in entry.arguments
        if isinstance(argument.value, (TensorArg, RuntimeArg))
    }
    dtypes |= {
        argument.name: np.dtype(bool)
        for argument in entry.arguments
        if isinstance(argument.value, ConstantArg) and isinstance(argument.value.value, bool)
    }
    result = next((output.computed.dtype for output in entry.outputs if output.computed is not None), None)
    return not lowering.takes(dtypes, result, entry.compute_dtype)


def _compiles_on_tpu(entry: Signature) -> bool:
    dtypes = [lowered_dtype(tensor.dtype) for tensor in entry.tensors()]
    dtypes += [output.computed.dtype for output in entry.outputs if output.computed is not None]
    return registry.TABLE[entry.name].compiles_on_tpu(dtypes)


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


def segment_function(description: dict[str, Any], bounds_checks: list[BoundsCheck]) -> Any:
    """The pure function of a segment: input arrays, then packed floats, doubles, integers -> outputs.

    Tracing it fills ``bounds_checks``; where there are any, what was out of range (int64, one each) is a last
    output.
    """
    tape: list[int] = description["tape"]
    inputs: list[int] = description["inputs"]
    outputs: list[int] = description["outputs"]
    offset_examples: list[int] = description["offsets"]
    offset_is_input: list[bool] = description["offset_is_input"]
    num_integers: int = description["num_integers"]
    packs = [description["num_floats"] > 0, description["num_doubles"] > 0]
    has_integers = num_integers > 0 or any(offset_is_input)
    labels: Sequence[str] = description.get("labels", ())  # of entries, for a program's metadata

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        values: dict[int, packed.Value] = dict(zip(inputs, arguments))
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
        numbers = Numbers(_each(floats), _each(doubles), _each(integers), offsets)
        taken = set(inputs)
        fresh = (local for local in itertools.count() if local not in taken)  # numbers of values made here
        with collect_bounds_checks() as collected, gathers.traced_program():
            for collected.entry, (entry, precision, links) in enumerate(entries(tape)):
                label = jax.named_scope(labels[collected.entry]) if labels else nullcontext()
                with recorded_settings(precision), label:
                    try:
                        made = replay(entry, iter(links), values, numbers)
                    except Exception as error:
                        if entry.name not in ALWAYS:
                            raise
                        raise _failure(entry, first_line(entry.number), error) from error
                    gathers.note_made(entry.name, made)
                    for value in made:
                        values[next(fresh)] = value
        bounds_checks[:] = collected.made
        results = tuple(packed.whole(values[output]) for output in outputs)
        return (*results, jnp.stack(collected.out_of_range)) if bounds_checks else results

    return run
