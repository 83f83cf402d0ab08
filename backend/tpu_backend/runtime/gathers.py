"""Gathers of FSDP2 on a TPU: when they run, and in which dtype.

What is here holds for the program that a thread traces inside of `in_order`. Elsewhere a gather is a gather.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering import registry
from tpu_backend.lowering.platforms import lowered_for

Dtypes = tuple[jnp.dtype, jnp.dtype]
"""What a copy computes in, and what it stores."""


@dataclass(frozen=True)
class _Gather:
    """One of a rank's shard."""

    shard: jax.Array
    """As the program has it: the same in all gathers of it."""
    given: jax.Array
    """The shard, as a value that depends on what runs before."""
    ranks: Sequence[int]
    made: jax.Array
    converted: dict[Dtypes, jax.Array] = field(default_factory=dict)

    def to(self, dtypes: Dtypes) -> jax.Array:
        """What it made in other dtypes. The shard is converted: there is less to gather."""
        if dtypes not in self.converted:
            self.converted[dtypes] = _all_gather(_converted(self.given, dtypes), self.ranks)
        return self.converted[dtypes]


@dataclass
class _Program:
    """What was traced of it. Arrays are known by their `id`, and held, so that no other gets it."""

    scattered: list[tuple[jax.Array, ...]] = field(default_factory=list)
    gathers: dict[int, _Gather] = field(default_factory=dict)
    """By what they made."""
    conversions: defaultdict[int, list[tuple[jax.Array, Dtypes]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """By shard: what its gathers were converted to."""
    newest: dict[int, jax.Array] = field(default_factory=dict)
    """By what an earlier gather was converted to."""


_traced: ContextVar[_Program | None] = ContextVar("program that is traced", default=None)


@contextmanager
def in_order() -> Iterator[None]:
    """In this context a gather on a TPU runs after the scatters before it.

    XLA would put products of weights' gradients, and scatters that it makes all-reduces of, at the end of the
    program, as long as there is memory. Until then what they are made of, and the gradients of all layers,
    would be in memory.
    """
    before = _traced.set(_Program() if lowered_for() == "tpu" else None)
    try:
        yield
    finally:
        _traced.reset(before)


def note_scattered(parts: tuple[jax.Array, ...]) -> None:
    """The results of a scatter, which later gathers run after."""
    if (program := _traced.get()) is not None:
        program.scattered.append(parts)


def gathered(shards: tuple[jax.Array, ...], ranks: Sequence[int]) -> tuple[jax.Array, ...]:
    """Each shard, gathered along its first dim.

    FSDP2 gathers a layer's weights again for its backward pass. Under autocast that pass reads what the
    forward pass converted them to, which would be whole in memory meanwhile: from here on it reads the new
    gather, converted.
    """
    program = _traced.get()
    if program is None:
        return tuple(_all_gather(each, ranks) for each in shards)
    made = []
    for shard, given in zip(shards, _after_scatters(shards, program.scattered), strict=True):
        gather = _Gather(shard, given, ranks, _all_gather(given, ranks))
        program.gathers[id(gather.made)] = gather
        for older, dtypes in program.conversions[id(shard)]:
            program.newest[id(older)] = gather.to(dtypes)
        made.append(gather.made)
    return tuple(made)


def converted(value: jax.Array, computed: jnp.dtype, stored: jnp.dtype) -> jax.Array:
    """A copy's result."""
    program, dtypes = _traced.get(), (computed, stored)
    gather = None if program is None else program.gathers.get(id(value))
    if program is None or gather is None or stored.itemsize >= value.dtype.itemsize:
        return _converted(value, dtypes)
    made = gather.to(dtypes)
    program.conversions[id(gather.shard)].append((made, dtypes))
    return made


def newest(value: jax.Array) -> jax.Array:
    """The same values, from the last gather."""
    program = _traced.get()
    return value if program is None else program.newest.get(id(value), value)


def _converted(value: jax.Array, dtypes: Dtypes) -> jax.Array:
    for dtype in dtypes:
        value = registry.converted(value, dtype)
    return value


def _all_gather(shard: jax.Array, ranks: Sequence[int]) -> jax.Array:
    made: jax.Array = registry.TABLE["tpu_collective::all_gather"].function(shard, ranks)
    return made


def _after_scatters(
    shards: tuple[jax.Array, ...], scattered: list[tuple[jax.Array, ...]]
) -> tuple[jax.Array, ...]:
    """The shards, as values that depend on the scatters so far."""
    if not scattered:
        return shards
    shards, _ = lax.optimization_barrier((shards, tuple(scattered)))
    del scattered[:-1]  # a later gather need not name them again
    return shards
