"""What libtpu makes of a reduce-scatter over all chips of a slice: of one over all of them at once, and of
several, along one torus axis after the other. Compiled here, run nowhere.

    python -m tests.benchmarks.reduce_scatter v5e:4x4 v6e:16x16 v5p:4x4x4
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpu_backend import ahead_of_time, hlo

ROWS, INPUTS, OUTPUTS = 1024, 8192, 4096


def at_once(gradient: jax.Array, axes: list[list[list[int]]]) -> jax.Array:
    return lax.psum_scatter(gradient, "ranks", tiled=True)


def along_axes(gradient: jax.Array, axes: list[list[list[int]]]) -> jax.Array:
    """The same parts on the same chips."""
    for groups in axes:
        gradient = lax.psum_scatter(gradient, "ranks", tiled=True, axis_index_groups=groups)
    return gradient


def compiled(topology: str, scatter: Callable[..., jax.Array]) -> str:
    """Its collectives with the chips of a group, and MiB of temporaries."""
    places, chips = ahead_of_time.places(topology), ahead_of_time.chips(topology)
    order = sorted(range(len(chips)), key=lambda index: places[index])
    shape = [1 + max(place[axis] for place in places) for axis in (1, 2, 3)]
    ranks = np.arange(len(chips)).reshape(shape)
    axes = [
        np.moveaxis(ranks, axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(shape) if size > 1
    ]
    mesh = Mesh(np.array([chips[index] for index in order]), ("ranks",))

    def gradient(inputs: jax.Array, outputs: jax.Array) -> jax.Array:
        return scatter(inputs.T @ outputs, axes)

    step = jax.shard_map(
        gradient, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    made = jax.jit(step).lower(of((ROWS, INPUTS)), of((ROWS, OUTPUTS))).compile()
    kinds = ", ".join(f"{each.kind} of {len(each.group)}" for each in hlo.collectives(made.as_text()))
    return f"{kinds}; temporaries {made.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB"


if __name__ == "__main__":
    for topology in sys.argv[1:]:
        for scatter in (at_once, along_axes):
            print(f"{topology:10} {scatter.__name__:10} {compiled(topology, scatter)}", flush=True)
