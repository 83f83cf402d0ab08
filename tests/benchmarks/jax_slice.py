"""What an expert would write in JAX alone to train a Llama on a slice, compiled for one that is not here.

Parameters are float32, stacked over the layers and divided over all chips (FSDP) with the optimizer's
state; the batch is divided by its rows. The compiler's partitioner does the communication (`jit` with
`NamedSharding`). The layers are one scan. Three things that simpler steps lost time with are done otherwise:
queries, keys and values come out of their products by heads; a rotation turns all lanes of a head at once;
the head's gradient is reduced once, and not once a block of tokens.

    python -m tests.benchmarks.jax_slice llama-8b v6e:16x16 --rows 3 --kernel --recompute \\
        --option xla_tpu_scoped_vmem_limit_kib=98304
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from tests.benchmarks.jax_reference import Params, State, llama_loss, training_step, updated
from tpu_backend import ahead_of_time, hlo
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig, inverse_frequencies
from tputrain.parallel.layout import Layout
from tputrain.parallel.step_schedule import KINDS, Schedule
from tputrain.parallel.topology import GIB, Topology
from tputrain.planning.compiled_step import chips_by_rank, scheduled_step

REPLICAS, CHIPS = "replicas", "chips"
WHOLE, ROWS = PartitionSpec(), PartitionSpec((REPLICAS, CHIPS))
EMBEDDING, HEAD, LAST_NORM = "embedding", "head", "norm"
KEPT_WIDE = (EMBEDDING, HEAD, LAST_NORM)
"""Parameters that are not stacked over layers."""


@dataclass(frozen=True)
class SliceStep:
    """What is compiled."""

    config: LlamaConfig
    topology: str
    rows: int
    """Sequences a chip."""
    sequence: int
    recomputes: bool
    """Keep only the input of each layer, and compute the layer again in the backward pass."""
    has_kernel: bool = False
    """Splash attention (JAX's Pallas kernel). Else scores are in memory."""
    weights: str = "float32"
    """The dtype of parameters and of the optimizer's state. Products are in bfloat16 always."""
    block_of_loss: int = 1024
    """Tokens of a row whose logits are in memory at once; a divisor of `sequence`."""
    replicas: int = 1
    """Groups of chips, each of which shares one copy of the parameters."""


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """By name; those of layers with the layers first. Inputs are rows, outputs are columns."""
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    query, key = (
        heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
    )
    of_layers = {
        "attention_norm": (hidden,),
        "query": (hidden, query),
        "key": (hidden, key),
        "value": (hidden, key),
        "output": (query, hidden),
        "mlp_norm": (hidden,),
        "gate": (hidden, mlp),
        "up": (hidden, mlp),
        "down": (mlp, hidden),
    }
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), LAST_NORM: (hidden,)}
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes | {name: (layers, *shape) for name, shape in of_layers.items()}


def parameter_spec(name: str, shape: Sequence[int], num_chips: int) -> PartitionSpec:
    """Divided by the first dim that divides, which is not the layers'."""
    first = 0 if name in KEPT_WIDE else 1
    for dim in range(first, len(shape)):
        if shape[dim] % num_chips == 0:
            return PartitionSpec(*[None] * dim, CHIPS)
    return WHOLE


def loss_of(step: SliceStep, mesh: Mesh) -> Callable[[Params, tuple[Array, Array]], Array]:
    """The mean cross-entropy of tokens and labels (chips * rows, sequence), computed in bfloat16."""
    config, dtype = step.config, jnp.bfloat16
    H, K, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    by_rows = NamedSharding(mesh, ROWS)
    angles = np.arange(step.sequence)[:, None] * np.array(inverse_frequencies(config))  # (S, D / 2)
    cosine = jnp.asarray(np.concatenate([np.cos(angles)] * 2, -1), dtype)
    sine = jnp.asarray(np.concatenate([-np.sin(angles), np.sin(angles)], -1), dtype)
    attend = _splash(step, mesh) if step.has_kernel else _plain

    def rms_norm(hidden: Array, weight: Array) -> Array:
        wide = hidden.astype(jnp.float32)
        wide = wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + config.rms_norm_eps)
        return wide.astype(dtype) * weight.astype(dtype)

    def rotated(x: Array) -> Array:
        return x * cosine + jnp.roll(x, D // 2, -1) * sine

    def layer(hidden: Array, weights: Params) -> tuple[Array, None]:
        hidden = lax.with_sharding_constraint(hidden, by_rows)
        of = {name: weight.astype(dtype) for name, weight in weights.items()}

        def by_heads(normed: Array, name: str, heads: int) -> Array:
            return jnp.einsum("bse,ehd->bhsd", normed, of[name].reshape(-1, heads, D))

        normed = rms_norm(hidden, weights["attention_norm"])
        query = rotated(by_heads(normed, "query", H)) * D**-0.5
        key, value = rotated(by_heads(normed, "key", K)), by_heads(normed, "value", K)
        mixed = attend(query, key, value)
        hidden = hidden + jnp.einsum("bhsd,hde->bse", mixed, of["output"].reshape(H, D, -1))
        normed = rms_norm(hidden, weights["mlp_norm"])
        gated = jax.nn.silu(normed @ of["gate"]) * (normed @ of["up"])
        return lax.with_sharding_constraint(hidden + gated @ of["down"], by_rows), None

    def loss(params: Params, batch: tuple[Array, Array]) -> Array:
        tokens, labels = batch
        whole = NamedSharding(mesh, WHOLE)
        embedding = lax.with_sharding_constraint(params[EMBEDDING].astype(dtype), whole)
        hidden = lax.with_sharding_constraint(embedding[tokens], by_rows)
        of_layers = {name: each for name, each in params.items() if name not in KEPT_WIDE}
        body = jax.checkpoint(layer) if step.recomputes else layer
        hidden, _ = lax.scan(body, hidden, of_layers)
        hidden = rms_norm(hidden, params[LAST_NORM])
        head = params.get(HEAD, params[EMBEDDING]).astype(dtype)
        own = jax.shard_map(
            partial(_own_loss, block=step.block_of_loss),
            mesh=mesh,
            in_specs=(ROWS, WHOLE, ROWS),
            out_specs=ROWS,
            check_vma=False,
        )
        return jnp.sum(own(hidden, head, labels)) / labels.size

    return loss


def _own_loss(hidden: Array, head: Array, labels: Array, block: int) -> Array:
    """The sum over a chip's tokens, (1,)."""

    @jax.checkpoint
    def of_block(total: Array, each: tuple[Array, Array]) -> tuple[Array, None]:
        hidden, labels = each
        logits = jnp.einsum("bse,ve->bsv", hidden, head, preferred_element_type=jnp.float32)
        own = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return total + jnp.sum(jax.nn.logsumexp(logits, -1) - own), None

    def in_blocks(whole: Array) -> Array:
        return jnp.moveaxis(whole.reshape(whole.shape[0], -1, block, *whole.shape[2:]), 1, 0)

    total, _ = lax.scan(of_block, jnp.float32(0), (in_blocks(hidden), in_blocks(labels)))
    return total[None]


def _plain(query: Array, key: Array, value: Array) -> Array:
    """Scores in memory; queries (B, H, S, D), keys and values (B, K, S, D)."""
    B, H, S, D = query.shape
    K = key.shape[1]
    scores = jnp.einsum("bkgsd,bktd->bkgst", query.reshape(B, K, H // K, S, D), key)
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -jnp.inf)
    weights = jax.nn.softmax(scores, -1)
    return jnp.einsum("bkgst,bktd->bkgsd", weights, value).reshape(B, H, S, D)


BLOCK, BLOCK_OF_COMPUTE = 1024, 512


def _splash(step: SliceStep, mesh: Mesh) -> Callable[[Array, Array, Array], Array]:
    mask = masks.MultiHeadMask(
        [masks.CausalMask((step.sequence, step.sequence))] * step.config.num_attention_heads
    )
    sizes = splash.BlockSizes(
        block_q=BLOCK,
        block_kv=BLOCK,
        block_kv_compute=BLOCK_OF_COMPUTE,
        block_q_dkv=BLOCK,
        block_kv_dkv=BLOCK,
        block_kv_dkv_compute=BLOCK_OF_COMPUTE,
        block_q_dq=BLOCK,
        block_kv_dq=BLOCK,
    )
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    blocks, size = step.sequence // BLOCK, step.config.head_dim
    pairs = blocks * (blocks + 1) // 2 * BLOCK**2 * step.config.num_attention_heads * step.rows

    def own(query: Array, key: Array, value: Array) -> Array:
        # The compiler has no time for the kernels: the walk knows them by this, as it does the device's own.
        with set_xla_metadata(attention=f"{pairs} {size} {size}"):
            return jax.vmap(kernel)(query, key, value)

    return jax.shard_map(own, mesh=mesh, in_specs=(ROWS, ROWS, ROWS), out_specs=ROWS, check_vma=False)


def lower(step: SliceStep) -> jax.stages.Lowered:
    """The step (state, learning rate, batch) -> (state, loss) with AdamW; the state is donated."""
    chips = ahead_of_time.chips(step.topology)
    chips = tuple(chips[place] for place in chips_by_rank(layout_of(step.topology, step.replicas)))
    mesh = Mesh(np.array(chips).reshape(step.replicas, -1), (REPLICAS, CHIPS))
    loss = loss_of(step, mesh)

    def placed(spec: PartitionSpec, shape: Sequence[int], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))

    shapes = parameter_shapes(step.config)
    params = {
        name: placed(parameter_spec(name, shape, mesh.shape[CHIPS]), shape, step.weights)
        for name, shape in shapes.items()
    }
    state = State(params, params, params, placed(WHOLE, (), jnp.int32))
    size = (len(chips) * step.rows, step.sequence)
    batch = (placed(ROWS, size, jnp.int32), placed(ROWS, size, jnp.int32))

    def training_step(state: State, learning_rate: Array, batch: tuple[Array, Array]) -> tuple[State, Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        gradients = {
            name: lax.with_sharding_constraint(each, params[name].sharding)
            for name, each in gradients.items()
        }
        return updated(state, gradients, learning_rate), value

    out = jax.tree.map(lambda each: each.sharding, state)
    jitted = jax.jit(training_step, donate_argnums=0, out_shardings=(out, NamedSharding(mesh, WHOLE)))
    return jitted.lower(state, placed(WHOLE, ()), batch)


def lower_unrolled(step: SliceStep) -> jax.stages.Lowered:
    """The step of `jax_reference` for one chip: every layer is written out, with parameters of its own. It
    computes in the weights' dtype, without activation checkpointing.
    """
    (chip,) = ahead_of_time.chips(step.topology)

    def placed(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=SingleDeviceSharding(chip))

    with torch.device("meta"):
        model = Llama(step.config)
    params = {name: placed(each.shape, step.weights) for name, each in model.named_parameters()}
    state = State(params, params, params, placed((), jnp.int32))
    batch = tuple(placed((step.rows, step.sequence), jnp.int32) for _ in range(4))
    return training_step(llama_loss(step.config)).lower(state, placed((), jnp.float32), batch)


def layout_of(topology: str, replicas: int = 1) -> Layout:
    """The chips of a topology share the parameters, or those of each replica do. Replicas are along the first
    axes. Raises ValueError where the axes do not divide so.
    """
    found, splits, left = Topology.parse(topology), [], replicas
    for axis in found.axes:
        along = gcd(left, axis.size)
        left //= along
        splits.append((1, 1, axis.size // along, along))
    if left > 1:
        raise ValueError(f"{topology}: its axes do not divide into {replicas} replicas")
    return Layout(found, tuple(splits))


# -- what the compiler says --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Compiled:
    """Bytes of a chip, and seconds."""

    arguments: float
    temporaries: float
    compile_seconds: float
    schedule: Schedule


def compiled(
    step: SliceStep,
    options: Mapping[str, Any] | None = None,
    text: str | None = None,
    lower: Callable[[SliceStep], jax.stages.Lowered] = lower,
) -> Compiled:
    """`text`: a file for the compiled program. Raises what JAX raises if it does not compile."""
    lowered = lower(step)
    began = time.perf_counter()
    made = lowered.compile(compiler_options=dict(options or {}))
    seconds = time.perf_counter() - began
    memory = made.memory_analysis()
    if text is not None:
        Path(text).write_text(made.as_text())
    return Compiled(
        memory.argument_size_in_bytes + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        memory.temp_size_in_bytes,
        seconds,
        scheduled_step(hlo.program(made.as_text()), layout_of(step.topology, step.replicas)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(LLAMA_CONFIGS))
    parser.add_argument("topology")
    parser.add_argument("--rows", type=int, default=1, help="sequences a chip")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--kernel", action="store_true")
    parser.add_argument("--weights", default="float32", help="their dtype, and that of the optimizer's state")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the compiler")
    parser.add_argument("--text", help="a file for the compiled program")
    given = parser.parse_args()
    config = LLAMA_CONFIGS[given.model]
    if given.layers:
        config = replace(config, num_hidden_layers=given.layers)
    step = SliceStep(
        config, given.topology, given.rows, given.sequence, given.recompute, given.kernel, given.weights
    )
    found = compiled(step, dict(each.split("=", 1) for each in given.option), given.text)
    spent = dict.fromkeys(KINDS, 0.0)
    for each, seconds in found.schedule.spent.items():
        spent[each.kind] += seconds
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f"{given.model} {given.topology}, {given.rows} rows: compiled in {found.compile_seconds:.0f} s "
        f"({resident:.1f} GiB here); arguments {found.arguments / GIB:.2f} GiB, temporaries "
        f"{found.temporaries / GIB:.2f} GiB; step {found.schedule.total:.4g} s: "
        + ", ".join(f"{kind} {seconds:.4g}" for kind, seconds in spent.items())
    )


if __name__ == "__main__":
    main()
