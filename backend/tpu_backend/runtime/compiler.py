"""The one place that talks to XLA: a segment's function becomes a loaded executable, or is found on disk."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tpu_backend import executable_cache
from tpu_backend.compiling import compiling
from tpu_backend.distributed import sharing
from tpu_backend.environment import current_mode
from tpu_backend.executable_cache import ExecutableCache
from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.lowering.collectives import axes_in_mesh
from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.padded import serving
from tpu_backend.padded.executable import Plan, Resized
from tpu_backend.padded.family import Lengthening
from tpu_backend.runtime import ahead, compile_log, described, known_forms
from tpu_backend.runtime.causes import Cause, causes_of, remember
from tpu_backend.runtime.chain import Chain, Link, planned, whole_link
from tpu_backend.runtime.compiler_options import options_for, with_chains_compiled
from tpu_backend.runtime.dtypes import stored_dtype
from tpu_backend.runtime.freed_memory import giving_back_freed_memory
from tpu_backend.runtime.parts import grows_with_gradients
from tpu_backend.runtime.program_key import environment, key_of_plan, key_of_tape, key_of_text
from tpu_backend.runtime.segment import segment_function
from tpu_backend.runtime.signature import summaries
from tpu_backend.runtime.stored_executable import (
    are_storable,
    bounds_checks_of,
    compiled_by_xla,
    deserialize,
    header_of,
    serialize,
)
from tpu_backend.runtime.tape import Tape
from tpu_backend.runtime.target import Target, target_for
from tpu_backend.runtime.user_line import first_line
from tpu_backend.untraced import untraced

LOGS = ("compile",)
log = logging.getLogger("tpu_backend.compile")

_largest_temporary = 0


def largest_temporary() -> int:
    """Bytes of temporary memory that the hungriest executable needs."""
    return _largest_temporary


@dataclass(frozen=True, eq=False)
class Executable:
    """A loaded program as the stream launches it: ``execute(arrays).consume_with_handlers(handlers)``.

    The call that JAX itself ends in.  What jax.jit does before it (finding the program by its arguments'
    signature) the stream has done already; without it a launch costs a fifth less.
    """

    execute: Callable[..., Any]
    handlers: list[Any]  # one an output: makes a jax.Array of a device buffer
    bounds_checks: tuple[BoundsCheck, ...]  # where there are any, what was out of range is the last output
    compiled: jax.stages.Compiled | None  # holds what a program's host callbacks need; None: from disk
    from_disk: bool
    key: str | None = None  # what another process finds it by
    is_padded: bool = False  # the program is longer than the segment
    is_shared: bool = False  # and was there: it serves another segment, too

    @property
    def source(self) -> str:
        """Where it came from: "memory", "disk" or "compiled"."""
        return "memory" if self.is_shared else "disk" if self.from_disk else "compiled"


def lower_segment(
    description: dict[str, Any], target: Target
) -> tuple[jax.stages.Lowered, tuple[BoundsCheck, ...]]:
    """A segment as a program for one device: it takes the segment's input arrays and then the packed numbers,
    and returns its outputs.  With it, its bounds checks, see `Executable`.

    Lowered with 64-bit types on, whatever the user's own JAX configuration says, which is left as it is.
    """
    bounds_checks: list[BoundsCheck] = []
    function = segment_function(description, bounds_checks)
    sharding = target.placement
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
    if target.mesh is not None:
        everywhere = PartitionSpec()
        function = jax.shard_map(
            _never_in_callers_thread(function) if target.platform == "cpu" else function,
            mesh=target.mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )
    with jax.enable_x64(True), lowering_for(target.platform), axes_in_mesh(dict(target.groups)):
        lowered = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*shapes)
    return lowered, tuple(bounds_checks)


def _never_in_callers_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a last output that nobody wants. XLA:CPU runs a program of fewer than 1,000
    operations in the thread that launches it, where a collective would wait for the other ranks.
    """

    def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        real = (each for each in arguments if each.size and not jnp.iscomplexobj(each))
        given = next(real, None)
        number = jnp.float32(1) if given is None else given.ravel()[0].astype("float32")
        numbers = jax.lax.broadcasted_iota("float32", (64, 64), 0) * number
        return (*function(*arguments), jnp.sum(numbers))

    return run


_WAITS = "tpu: waiting for the one program that follows first steps in parts, this once (docs/execution.md)"
_LONGEST_WAIT = 60.0  # seconds; a program that takes longer may take for ever

# Programs of chains, as long as a chain holds them: equal parts of other segments share them.
_of_chains: WeakValueDictionary[Hashable, Executable] = WeakValueDictionary()


def plan_segment(description: dict[str, Any]) -> tuple[int, bool]:
    """Into how many parts a segment can be taken, and whether they are the turns of a loop that grows."""
    if is_chain_of_ranks(description):
        return 1, False
    _, plan = planned(description)
    return len(plan.parts), plan.grows


def is_chain_of_ranks(description: dict[str, Any]) -> bool:
    """Whether a region's segment is a chain as ranks differ in it, see `distributed/region_programs.py`."""
    return description["agreement"] is not None and description["agreement"].parts is not None


def compile_segment(description: dict[str, Any], may_wait: bool) -> list[Link]:
    """Return the links that run a segment: one program, or a chain if `description` asks for parts. Each
    program (`lower_segment` says what it takes) comes from the executable
    cache if it is there; else it is compiled, and kept there.

    The stream's lock is not held here: what is compiled may be Python of the user's. `may_wait`: else other
    threads are not waited for, since one of them may be waiting for this one.

    Raises TimeoutError if `description` says that it may, and a thread compiles the program for longer than
    `_LONGEST_WAIT` after the first of these calls: the steps go on in parts.
    """
    if described.here is not None:
        return [whole_link(description, described.describe(description), "memory")]
    if is_chain_of_ranks(description):
        agreed = description["agreement"]
        return _compile_chain(Chain(description, agreed.parts, agreed.interfaces))
    if description["in_parts"]:
        return _compile_chain(Chain(description))
    if description["may_time_out"]:
        _wait_for_what_follows(description)
    with compiling(len(description["circumstances"]), partial(_described, [description])):
        executable = _executable(description, may_wait)
    return [whole_link(description, executable, executable.source)]


def _compile_chain(chain: Chain) -> list[Link]:
    """The links of a segment's parts; threads compile their programs side by side."""
    keys = [ahead.key_of(part) for part in chain.descriptions]
    programs = {key: found for key in keys if (found := _of_chains.get(key)) is not None}
    missing = {key: part for key, part in zip(keys, chain.descriptions) if key not in programs}
    compile_ahead(list(missing.values()), waits=True)
    links = []
    for place, key in enumerate(keys):
        source = "memory"
        if key not in programs:
            programs[key] = _of_chains[key] = _executable(missing[key], may_wait=True)
            source = programs[key].source
        links.append(chain.link(place, programs[key], source))
    return links


def _executable(description: dict[str, Any], may_wait: bool) -> Executable:
    """A program that a thread has compiled ahead, or is compiled now."""
    if (found := ahead.result(description, may_wait)) is not None:
        return found
    mode = current_mode()
    made = _compile(description, lambda: causes_of([description], mode)[0], may_wait)
    if made.source != "compiled":
        remember(description, mode)
    return made


def _wait_for_what_follows(description: dict[str, Any]) -> None:
    """Said once for a program, and once that the wait is given up."""
    if not ahead.is_compiling(description):
        return
    if ahead.is_given_up(description):
        raise TimeoutError
    print(_WAITS, file=sys.stderr, flush=True)
    with compiling(len(description["circumstances"]), partial(_described, [description])):
        ahead.wait([description], _LONGEST_WAIT)
    if ahead.is_compiling(description):
        ahead.give_up(description)
        print(
            f"tpu: still compiling after {_LONGEST_WAIT:.0f} s more: steps stay in parts until it is there",
            file=sys.stderr,
            flush=True,
        )
        raise TimeoutError


def prepare_segment(description: dict[str, Any]) -> None:
    """Have a thread make the program that `compile_segment` will be asked for."""
    compile_ahead([description], waits=False)


def compile_ahead(descriptions: list[dict[str, Any]], waits: bool) -> None:
    """Have threads make the programs of these descriptions. `waits` until each is there, or has failed,
    which is told where the program is asked for.
    """
    if not descriptions:
        return
    causes = causes_of(descriptions, current_mode())
    for description in filter(serving.may_be_padded, descriptions):
        serving.note(description)  # first: what grows shows in all of them
    for description, cause in zip(descriptions, causes, strict=True):
        ahead.begin(description, partial(_compile, cause=repeat(cause).__next__))
    if waits:
        num_ops = sum(len(description["circumstances"]) for description in descriptions)
        with compiling(num_ops, partial(_described, descriptions)):
            ahead.wait(descriptions)


def _described(descriptions: Sequence[dict[str, Any]]) -> str:
    """Which operations are compiled, where they were met first, and what saves the next start this."""
    met = [entry for description in descriptions for entry, _, _ in summaries(description["tape"])]
    cache = executable_cache.current()
    kept = "TPU_CACHE_DIR=DIR keeps it" if cache is None else f"it will be kept in {cache.directory}"
    names = _first_of([entry.overload for entry in met])
    grows = any(grows_with_gradients(Tape.of(description)) for description in descriptions)
    advice = "; the turns of a loop that grows share a program under torch.no_grad()" if grows else ""
    return f"{names}, at {first_line(met[0].number)}; {kept} for the next start{advice}"


def _compile(description: dict[str, Any], cause: Callable[[], Cause], may_wait: bool = True) -> Executable:
    names = tuple(entry.overload for entry, _, _ in summaries(description["tape"]))
    cache = executable_cache.current()
    target = target_for(description)
    options = options_for(description, target)
    key = key_of_tape(description, options, target)
    if cache is not None and key is not None and (found := _load(cache, key, names, target)) is not None:
        return found
    if serving.may_be_padded(description):
        if (padded := _padded(description, cache, key, names, cause, may_wait)) is not None:
            return padded
        serving.note(description)
    if key is not None and (shared := sharing.compiled_elsewhere(key, target.num_ranks)) is not None:
        return _loaded(*shared, key, target)
    try:
        start = time.perf_counter()
        lowered, bounds_checks = lower_segment(description, target)
        if log.isEnabledFor(logging.DEBUG):
            log.debug("%s", lowered.as_text())
        if key is None:
            key = key_of_text(lowered, bounds_checks, options, target)
            if cache is not None and (found := _load(cache, key, names, target)) is not None:
                return found
            if (shared := sharing.compiled_elsewhere(key, target.num_ranks)) is not None:
                return _loaded(*shared, key, target)
        return _compiled(lowered, bounds_checks, options, target, cache, key, names, cause, start)
    except BaseException:
        if key is not None:
            sharing.give_up(key)  # others may wait for it
        raise


def _padded(
    description: dict[str, Any],
    cache: ExecutableCache | None,
    key: str | None,
    names: Sequence[str],
    cause: Callable[[], Cause],
    may_wait: bool,
) -> Executable | None:
    """The executable of a segment that a padded program serves, of this process or an earlier one."""
    made: list[Executable] = []  # for this segment: the first of those that share it
    target = target_for(description)

    def build(lengthening: Lengthening) -> serving.Program:
        program = _compile_padded(lengthening, names, cause)
        made.append(program)
        return serving.Program(program.execute, program.handlers, program.compiled, program.key)

    def load(key: str) -> Executable | None:
        found = None if cache is None else _load(cache, key, names, target)
        made.extend(filter(None, [found]))
        return found

    def executable(
        program: serving.Program, plan: Plan, bounds_checks: tuple[BoundsCheck, ...]
    ) -> Executable:
        execute = Resized(program.execute, program.handlers, plan, description["device"])
        from_disk = bool(made) and made[0].from_disk
        return Executable(
            execute,
            [],
            bounds_checks,
            program.compiled,
            from_disk,
            program.key,
            is_padded=True,
            is_shared=not made,
        )

    key = None if key is None else key_of_plan(key, target)
    if cache is not None and key is not None and (found := cache.read(key)) is not None:
        header, _ = found
        if (program := serving.loaded(header["program"], load)) is not None:
            return executable(program, Plan(**header["plan"]), bounds_checks_of(header))
    served = serving.serve(description, build, may_wait)
    if served is None:
        return None
    if cache is not None and key is not None and are_storable(served.bounds_checks):
        plan = {
            "program": served.program.key,
            "plan": served.plan._asdict(),
            "environment": environment(target),
        }
        cache.write(key, header_of([], served.bounds_checks, 0) | plan, b"")
        known_forms.keep()
    return executable(served.program, served.plan, served.bounds_checks)


def _compile_padded(lengthening: Lengthening, names: Sequence[str], cause: Callable[[], Cause]) -> Executable:
    """The program of a family at a bucket, from the executable cache or compiled and kept there."""
    start = time.perf_counter()
    cache = executable_cache.current()
    description = lengthening.family.description
    places = {local: position for position, local in enumerate(description["inputs"])}
    donated = tuple(places[local] for local in description["donated"])
    target = target_for(description)
    shapes = lengthening.shapes(target.placement)
    with jax.enable_x64(True), lowering_for(target.platform):
        lowered = jax.jit(lengthening.function, donate_argnums=donated, keep_unused=True).lower(*shapes)
    options = options_for(description, target, lengthening.largest)
    key = key_of_text(lowered, (), options, target)
    if cache is not None and (found := _load(cache, key, names, target)) is not None:
        return found
    if (shared := sharing.compiled_elsewhere(key, target.num_ranks)) is not None:
        return _loaded(*shared, key, target)
    try:
        return _compiled(lowered, (), options, target, cache, key, names, cause, start)
    except BaseException:
        sharing.give_up(key)
        raise


def _compiled(
    lowered: jax.stages.Lowered,
    bounds_checks: tuple[BoundsCheck, ...],
    options: dict[str, Any] | None,
    target: Target,
    cache: ExecutableCache | None,
    key: str,
    names: Sequence[str],
    cause: Callable[[], Cause],
    start: float,
) -> Executable:
    """Has XLA compile a program, keeps it on disk, and gives it to other ranks."""
    is_kept = cache is not None or sharing.is_needed()
    stored = compiled_by_xla() if is_kept else nullcontext()
    with jax.enable_x64(True), stored, giving_back_freed_memory:
        compiled = lowered.compile(compiler_options=with_chains_compiled(options, lowered, target))
    memory = compiled.memory_analysis()
    temporary_bytes = 0 if memory is None else memory.temp_size_in_bytes
    _remember_temporary(temporary_bytes)
    compile_log.record(tuple(names), time.perf_counter() - start, cause())
    if is_kept:
        payload = _serialized(compiled) if are_storable(bounds_checks) else None
        header = header_of(jax.tree.leaves(lowered.out_info), bounds_checks, temporary_bytes)
        if payload is None:
            sharing.give_up(key)
        else:
            sharing.publish(key, header, payload)
        if cache is not None and payload is not None:
            cache.write(key, header | {"environment": environment(target)}, payload)
            known_forms.keep()
    replicated: Any = compiled._executable.unsafe_call  # type: ignore[attr-defined]
    execute = replicated.xla_executable.execute_sharded
    handlers = list(replicated.out_handler.handlers)
    if target.mesh is not None:
        execute, handlers = RankExecute(execute), []
    return Executable(execute, handlers, bounds_checks, compiled, from_disk=False, key=key)


class RankExecute:
    """Launches a program of a mesh with one rank's arrays, and gives its results as such."""

    def __init__(self, execute: Callable[..., Any]):
        self._execute = execute

    @untraced
    def __call__(self, arrays: list[Any], with_tokens: bool) -> _RankResults:
        return _RankResults(self._execute(arrays, with_tokens=with_tokens))


class _RankResults:
    def __init__(self, results: Any):
        self._results = results

    @untraced
    def consume_with_handlers(self, handlers: list[Any]) -> list[Any]:
        return [arrays[0] for arrays in self._results.disassemble_into_single_device_arrays()]

    @untraced
    def consume_token(self) -> Any:
        return self._results.consume_token()


def _load(cache: ExecutableCache, key: str, names: Sequence[str], target: Target) -> Executable | None:
    found = cache.read(key)
    if found is None:
        return None
    try:
        executable = _loaded(*found, key, target)
    except jax.errors.JaxRuntimeError as error:
        cache.discard(key, f"XLA refuses it ({str(error).splitlines()[0]})")
        return None
    log.info("loaded %d ops from %s: %s", len(names), cache.directory, _first_of(names))
    return executable


def _loaded(header: dict[str, Any], payload: bytes, key: str, target: Target) -> Executable:
    """A program that another process compiled."""
    loaded, handlers = deserialize(header, payload, target)
    _remember_temporary(header["temporary_bytes"])
    execute: Callable[..., Any] = loaded.execute_sharded
    if target.mesh is not None:
        execute, handlers = RankExecute(execute), []
    return Executable(execute, handlers, bounds_checks_of(header), None, from_disk=True, key=key)


def _serialized(compiled: jax.stages.Compiled) -> bytes | None:
    """XLA's bytes of a program; None where other processes cannot load it."""
    replicated: Any = compiled._executable.unsafe_call  # type: ignore[attr-defined]
    if replicated.has_host_callbacks or replicated.keepalive:
        return None  # it calls functions of this process
    try:
        return serialize(compiled.runtime_executable())
    except jax.errors.JaxRuntimeError as error:
        log.info("not kept on disk: %s", str(error).splitlines()[0])
        return None


def _remember_temporary(num_bytes: int) -> None:
    global _largest_temporary
    _largest_temporary = max(_largest_temporary, num_bytes)


def _first_of(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def configure_logging() -> None:
    """``TPU_LOGS="compile"`` or ``"+compile"`` (with the program's text), in the manner of ``TORCH_LOGS``.

    Without it a log speaks from warnings on, as PyTorch's do: else a script's own
    ``logging.basicConfig(level=logging.INFO)`` would get a line for each program.
    """
    for name in LOGS:
        logger = logging.getLogger(f"tpu_backend.{name}")
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.WARNING)
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
