"""Gathers of FSDP2 on a TPU: when they run, and in which dtype.

These rules hold while a program for a TPU is traced inside of `traced_program`. Elsewhere gathers are left as
they are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering import registry
from tpu_backend.lowering.platforms import lowered_for

_LOSS_GRADIENT = "tpu::loss_gradient"

Dtypes = tuple[jnp.dtype, jnp.dtype]
"""What a copy computes in, and what it stores."""


@dataclass(frozen=True)
class _Gather:
    """An all-gather of one shard."""

    shard: jax.Array
    """As the program has it: the same in all gathers of it."""
    ordered_shard: jax.Array
    """The same as a value that depends on what runs before."""
    ranks: tuple[int, ...]
    result: jax.Array
    narrow: dict[Dtypes, jax.Array] = field(default_factory=dict)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """Gathers with equal keys have equal results."""
        return id(self.shard), self.ranks

    def in_dtypes(self, dtypes: Dtypes) -> jax.Array:
        """Its result in narrower ones. The shard is converted: there is less to gather."""
        if dtypes not in self.narrow:
            self.narrow[dtypes] = _all_gather(_converted(self.ordered_shard, dtypes), self.ranks)
        return self.narrow[dtypes]


@dataclass
class _Program:
    """Its gathers and scatters so far. Arrays are known by their `id`, and held, so that no other gets it."""

    awaited: list[tuple[jax.Array, ...]] = field(default_factory=list)
    """The results of scatters, and gradients of a loss."""
    latest: jax.Array | None = None
    """The newest floating value of several dims. Where FSDP2 gathers, that is what the layer takes."""
    latest_at_gather: jax.Array | None = None
    """`latest` at the gather before."""
    gathers: dict[int, _Gather] = field(default_factory=dict)
    """By their results."""
    conversions: defaultdict[tuple[int, tuple[int, ...]], dict[int, tuple[jax.Array, Dtypes]]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    """By the key of gathers: what their results were converted to."""
    recent: deque[list[_Gather]] = field(default_factory=lambda: deque(maxlen=2))
    """The gathers of the last units."""
    newest: dict[int, jax.Array] = field(default_factory=dict)
    """Of converted results of earlier gathers: the same values from the newest one."""


_traced: ContextVar[_Program | None] = ContextVar("program that is traced", default=None)


@contextmanager
def traced_program() -> Iterator[None]:
    """A program is traced in this context. On a TPU each of its gathers runs after the scatters before it,
    and after the gradients that a loss made.

    XLA would put products that give weights' gradients, and scatters that it makes all-reduces of, at the end
    of the program, as long as there is memory. Until then the gradients of all layers, or the activations
    that they need, would stay in memory; of a tied head, whose gradient is scattered last, all logits'.
    """
    before = _traced.set(_Program() if lowered_for() == "tpu" else None)
    try:
        yield
    finally:
        _traced.reset(before)


def note_made(name: str, values: Sequence[object]) -> None:
    """Note what an entry has made: later gathers may wait for it.

    Of several values that is the first. A loss's gradients, behind it, would be made in float32 for them.
    """
    program = _traced.get()
    if program is None or not values:
        return
    first = values[0]
    if isinstance(first, jax.Array) and first.ndim > 1 and jnp.issubdtype(first.dtype, jnp.floating):
        program.latest = first
        if name == _LOSS_GRADIENT:
            program.awaited.append((first,))


def scattered(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The results of a scatter, which later gathers run after.

    Where XLA makes an all-reduce of a scatter, it would take a rank's part out of it where the part is used:
    the optimizer's step, at the end. Until then all of it would stay in memory.
    """
    if (program := _traced.get()) is not None:
        parts = lax.optimization_barrier(parts)
        program.awaited.append(parts)
    return parts


def awaited() -> tuple[jax.Array, ...]:
    """What gathers from here on run after. What the newest gather waits for is left out, but for the last."""
    program = _traced.get()
    return () if program is None else tuple(each for parts in program.awaited for each in parts)


def gathered(shards: tuple[jax.Array, ...], ranks: Sequence[int]) -> tuple[jax.Array, ...]:
    """Each shard, gathered along its first dim.

    FSDP2 gathers a layer's weights again for its backward pass. Under autocast that pass reads the converted
    weights of the forward pass, which would stay in memory meanwhile, whole. Reads of those give the new
    gather's from here on.
    """
    program = _traced.get()
    if program is None:
        return tuple(_all_gather(each, ranks) for each in shards)
    if not program.awaited and (found := _gathered_just_now(shards, tuple(ranks), program)) is not None:
        return found
    results = []
    program.recent.append([])
    for shard, ordered in zip(shards, _ordered(shards, program), strict=True):
        gather = _Gather(shard, ordered, tuple(ranks), _all_gather(ordered, ranks))
        program.recent[-1].append(gather)
        program.gathers[id(gather.result)] = gather
        for older, (_, dtypes) in program.conversions[gather.key].items():
            program.newest[older] = gather.in_dtypes(dtypes)
        results.append(gather.result)
    return tuple(results)


def _gathered_just_now(
    shards: tuple[jax.Array, ...], ranks: tuple[int, ...], program: _Program
) -> tuple[jax.Array, ...] | None:
    """The results of the same gathers, if these are of one of the last two units: a head's, whose backward
    pass follows at once.
    """
    for unit in program.recent:
        if [gather.key for gather in unit] == [(id(shard), ranks) for shard in shards]:
            return tuple(gather.result for gather in unit)
    return None


def converted(value: jax.Array, computed: jnp.dtype, stored: jnp.dtype) -> jax.Array:
    """`value` in another dtype. The result of a gather is converted before it, if that makes it less."""
    program, dtypes = _traced.get(), (computed, stored)
    gather = None if program is None else program.gathers.get(id(value))
    if program is None or gather is None or stored.itemsize >= value.dtype.itemsize:
        return _converted(value, dtypes)
    result = gather.in_dtypes(dtypes)
    program.conversions[gather.key][id(result)] = result, dtypes
    return result


def renewed(parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The same values, from the newest gathers."""
    program = _traced.get()
    if program is None or not program.newest:
        return parts
    return tuple(program.newest.get(id(part), part) for part in parts)


def _converted(value: jax.Array, dtypes: Dtypes) -> jax.Array:
    for dtype in dtypes:
        value = registry.converted(value, dtype)
    return value


def _all_gather(shard: jax.Array, ranks: Sequence[int]) -> jax.Array:
    result: jax.Array = registry.TABLE["tpu_collective::all_gather"].function(shard, ranks)
    return result


def _ordered(shards: tuple[jax.Array, ...], program: _Program) -> tuple[jax.Array, ...]:
    """The shards, as values that depend on what is awaited so far. Where that is nothing yet, in a forward
    pass, they depend on what was computed when the gather before this one was asked for: one gather may be
    ahead.
    """
    before = tuple(program.awaited)
    if not before and program.latest_at_gather is not None:
        before = ((program.latest_at_gather,),)
    program.latest_at_gather = program.latest
    if not before:
        return shards
    shards, _ = lax.optimization_barrier((shards, before))
    del program.awaited[:-1]  # a later gather need not name them again
    return shards
