"""A program at a bucket as the executable of a segment that is shorter: inputs are padded, results cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from tpu_backend.padded.dims import Dim, Grown, is_grown
from tpu_backend.runtime.target import target_of
from tpu_backend.runtime.transfer import put_array, put_numbers
from tpu_backend.untraced import untraced

Pieces = list[list[int]]


def pieces(dims: Sequence[Dim], bucket: int, size: int) -> Pieces | None:
    """Blocks, places and places that count of each dim, as JSON holds them; None where all of it counts."""
    if not is_grown(dims) or bucket == size:
        return None
    return [
        [dim.blocks, dim.length.at(bucket), dim.length.at(size)] if isinstance(dim, Grown) else [1, dim, dim]
        for dim in dims
    ]


class Plan(NamedTuple):
    """What stands between a segment and the program that serves it."""

    inputs: Sequence[Pieces | None]  # by input, see `pieces`
    outputs: Sequence[Pieces | None]
    numbers: Sequence[int]  # the program's last argument


class Resized:
    """``execute`` of a segment's executable."""

    def __init__(self, execute: Callable[..., Any], handlers: list[Any], plan: Plan, device: int):
        self._execute, self._handlers, self._plan, self._device = execute, handlers, plan, device
        self._numbers = put_numbers(np.array(plan.numbers, np.int64), device)

    @untraced
    def __call__(self, arguments: list[jax.Array], with_tokens: bool) -> _Results:
        inputs = self._plan.inputs
        given = [
            array if pieces is None else padded(array, pieces, self._device)
            for array, pieces in zip(arguments, inputs, strict=False)
        ]
        results = self._execute([*given, *arguments[len(inputs) :], self._numbers], with_tokens=with_tokens)
        return _Results(results, self._handlers, self._plan.outputs, self._device)


class _Results:
    """What came out, as the recorder takes it."""

    def __init__(self, results: Any, handlers: list[Any], outputs: Sequence[Pieces | None], device: int):
        self._results, self._handlers, self._outputs, self._device = results, handlers, outputs, device

    @untraced
    def consume_with_handlers(self, _: list[Any]) -> list[jax.Array]:
        arrays = self._results.consume_with_handlers(self._handlers)
        for place, pieces in enumerate(self._outputs):
            if pieces is not None:
                arrays[place] = cut(arrays[place], pieces, self._device)
        return arrays

    @untraced
    def consume_token(self) -> Any:
        return self._results.consume_token()


def padded(array: jax.Array, pieces: Pieces, device: int) -> jax.Array:
    """The array with zeros behind what counts."""
    if target_of(device).platform != "cpu":
        return _program(tuple(map(tuple, pieces)), _pad)(array)
    host = np.zeros([places for _, places, _ in pieces], array.dtype)
    host[tuple(slice(count) for _, _, count in pieces)] = np.asarray(array)
    return put_array(host, device)


def cut(array: jax.Array, pieces: Pieces, device: int) -> jax.Array:
    """What counts of an array."""
    if target_of(device).platform != "cpu":
        return _program(tuple(map(tuple, pieces)), _crop)(array)
    host = np.array(_crop(np.asarray(array), tuple(map(tuple, pieces))), order="C", copy=True)
    return put_array(host, device)


def _pad(array: Any, pieces: tuple[tuple[int, ...], ...]) -> Any:
    return lax.pad(array, np.zeros((), array.dtype), [(0, places - count, 0) for _, places, count in pieces])


def _crop(array: Any, pieces: tuple[tuple[int, ...], ...]) -> Any:
    blocks = array.reshape([size for blocks, places, _ in pieces for size in (blocks, places)])
    kept = blocks[tuple(slice(count) for blocks, _, count in pieces for count in (blocks, count))]
    return kept.reshape([blocks * count for blocks, _, count in pieces])


@cache
def _program(pieces: tuple[tuple[int, ...], ...], function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """On a device whose memory the host does not see: a program a size."""
    compiled = jax.jit(lambda array: function(array, pieces))

    def run(array: jax.Array) -> jax.Array:
        with jax.enable_x64(True):
            return compiled(array)

    return run
