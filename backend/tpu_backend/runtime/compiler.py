"""The one place that talks to XLA: a segment's function becomes a loaded executable."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding

from tpu_backend.compiling import compiling
from tpu_backend.lowering.bounds import Demand
from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.platform import platform
from tpu_backend.runtime.segment import segment_function
from tpu_backend.runtime.signature import entries

LOGS = ("compile",)
log = logging.getLogger("tpu_backend.compile")

_largest_temporary = 0


def largest_temporary() -> int:
    """Bytes of temporary memory that the hungriest executable needs."""
    return _largest_temporary


class Executable(NamedTuple):
    """A loaded program as the stream launches it: ``execute(arrays).consume_with_handlers(handlers)``.

    The call that JAX itself ends in.  What jax.jit does before it (finding the program by its arguments'
    signature) the stream has done already; without it a launch costs a fifth less.
    """

    execute: Callable[[list[jax.Array]], Any]
    handlers: list[Any]  # one an output: makes a jax.Array of a device buffer
    demands: tuple[Demand, ...]  # of indices; where there are any, their offenders are the last output
    compiled: jax.stages.Compiled  # holds what a program's host callbacks need


def lower_segment(
    description: dict[str, Any], sharding: SingleDeviceSharding
) -> tuple[jax.stages.Lowered, tuple[Demand, ...]]:
    """A segment as a program for one device: it takes the segment's input arrays and then the packed numbers,
    and returns its outputs.  With it, what it demands of indices, see `Executable`.

    Lowered with 64-bit types on, whatever the user's own JAX configuration says, which is left as it is.
    """
    demands: list[Demand] = []
    function = segment_function(description, demands)
    shapes = [
        jax.ShapeDtypeStruct(tuple(dims), stored_dtype(dtype), sharding=sharding)
        for dtype, dims in description["input_layouts"]
    ]
    num_integers = description["num_integers"] + sum(description["offset_is_input"])
    for count, dtype in (
        (description["num_floats"], "float32"),
        (description["num_doubles"], "float64"),
        (num_integers, "int64"),
    ):
        if count:
            shapes.append(jax.ShapeDtypeStruct((count,), dtype, sharding=sharding))
    places = {local: position for position, local in enumerate(description["inputs"])}
    donated = tuple(places[local] for local in description["donated"])
    with jax.enable_x64(True):
        lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*shapes)
    return lowered, tuple(demands)


def compile_segment(description: dict[str, Any]) -> Executable:
    """Compile a segment for the device of this process (`lower_segment` says what the program takes)."""
    names = [entry.overload for entry, _, _ in entries(description["tape"])]
    with compiling(len(names)):
        lowered, demands = lower_segment(description, SingleDeviceSharding(platform().devices[0]))
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", lowered.as_text())
        with jax.enable_x64(True):
            compiled = lowered.compile()
    memory = compiled.memory_analysis()
    if memory is not None:
        global _largest_temporary
        _largest_temporary = max(_largest_temporary, memory.temp_size_in_bytes)
    if log.isEnabledFor(logging.INFO):
        log.info(
            "compiled %d ops: %s", len(names), ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        )
    replicated: Any = compiled._executable.unsafe_call  # type: ignore[attr-defined]
    return Executable(
        replicated.xla_executable.execute_sharded,
        list(replicated.out_handler.handlers),
        demands,
        compiled,
    )


def configure_logging() -> None:
    """``TPU_LOGS="compile"`` or ``"+compile"`` (with the program's text), in the manner of ``TORCH_LOGS``."""
    for item in filter(None, os.environ.get("TPU_LOGS", "").split(",")):
        name = item.strip().lstrip("+-")
        if name not in LOGS:
            raise RuntimeError(
                f"TPU_LOGS: there is no log {name!r}; there is {', '.join(LOGS)} (+ for more, - for less)"
            )
        level = logging.DEBUG if item.strip().startswith("+") else logging.INFO
        logger = logging.getLogger(f"tpu_backend.{name}")
        logger.setLevel(logging.ERROR if item.strip().startswith("-") else level)
        if not logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[tpu %(name)s] %(message)s"))
            logger.addHandler(handler)
