"""What an expert would write in JAX alone for FSDP over several processes, in the two ways that JAX has.

Parameters and the optimizer's state are divided by their first dim, the batch by its rows.  `partitioned`
leaves the communication to the compiler's partitioner (`jit` with `NamedSharding`): parameters are whole
where they are read.  `mapped` writes it down (`shard_map`): an all-gather of each parameter, whose gradient
is a reduce-scatter.
"""

from collections.abc import Callable
from functools import partial

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.benchmarks.jax_reference import Batch, Params, State, updated
from tests.benchmarks.jax_target import JaxSteps

SHARD, WHOLE = PartitionSpec("shard"), PartitionSpec()
Loss = Callable[[Params, Batch], Array]
Step = Callable[[State, np.float32, Batch], tuple[State, Array]]


def mapped(loss: Loss, mesh: Mesh) -> Step:
    """The jitted step of `training_step`, its communication written down."""
    specs = State(SHARD, SHARD, SHARD, WHOLE)

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs, WHOLE, SHARD), out_specs=(specs, WHOLE))
    def step(state: State, learning_rate: Array, batch: Batch) -> tuple[State, Array]:
        def loss_of(shards: Params) -> Array:
            gathered = jax.tree.map(partial(jax.lax.all_gather, axis_name="shard", tiled=True), shards)
            return loss(gathered, batch) / mesh.size

        total = partial(jax.lax.psum, axis_name="shard")
        value, gradients = jax.value_and_grad(loss_of)(state.params)
        return updated(state, gradients, learning_rate, total), total(value)

    return step


def partitioned(loss: Loss, mesh: Mesh) -> Step:
    """The jitted step of `training_step`, its communication left to the compiler."""
    shard, whole = NamedSharding(mesh, SHARD), NamedSharding(mesh, WHOLE)

    @partial(jax.jit, donate_argnums=0, out_shardings=(State(shard, shard, shard, whole), whole))
    def step(state: State, learning_rate: Array, batch: Batch) -> tuple[State, Array]:
        def loss_of(params: Params) -> Array:
            gathered = {name: jax.lax.with_sharding_constraint(each, whole) for name, each in params.items()}
            return loss(gathered, batch)

        value, gradients = jax.value_and_grad(loss_of)(state.params)
        return updated(state, gradients, learning_rate), value

    return step


class ShardedJaxSteps(JaxSteps):
    """A target for `interleave` in each of several processes; the state and the batch given are the whole."""

    def __init__(
        self, state: State, make_step: Callable[[Loss, Mesh], Step], loss: Loss, batch: tuple[np.ndarray, ...]
    ) -> None:
        mesh = Mesh(jax.devices(), ("shard",))
        super().__init__(state, loss, batch)

        def place(spec: PartitionSpec, tree):
            return jax.tree.map(partial(_own_part, NamedSharding(mesh, spec)), tree)

        self.step = make_step(loss, mesh)
        self.state = State(*(place(SHARD, each) for each in self.state[:3]), place(WHOLE, self.state.step))
        self.batch = place(SHARD, self.batch)


def _own_part(sharding: NamedSharding, whole: Array) -> Array:
    host = np.asarray(whole)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
