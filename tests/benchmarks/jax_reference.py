"""What an expert would write in JAX alone: the same models, loss and optimizer as one jitted, donated step.

The yardstick of the benchmarks.  Parameters are a flat dictionary under the names that the PyTorch model
gives them (a linear layer's weight is (outputs, inputs), as in PyTorch); AdamW, clipping and the learning
rate are as in torch.optim, so that both sides compute the same numbers (tested in test_jax_reference.py).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from torch import nn

from tputrain.models.llama import LlamaConfig

Params = dict[str, Array]
Batch = tuple[Array, ...]
BETA1, BETA2, EPSILON, WEIGHT_DECAY = 0.9, 0.999, 1e-8, 0.01  # torch.optim.AdamW's defaults
MAX_NORM = 1.0
IGNORED_LABEL = -100


class State(NamedTuple):
    """All that a step reads and replaces."""

    params: Params
    mean: Params
    variance: Params
    step: Array  # int32, steps done


def initial_state(model: nn.Module) -> State:
    """A state with copies of a PyTorch model's parameters, each name once."""
    params = {
        name: jnp.array(tensor.detach().cpu().float().numpy(), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in model.named_parameters()
    }
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return State(params, zeros(params), zeros(params), jnp.zeros((), jnp.int32))


def training_step(
    loss: Callable[[Params, Batch], Array],
) -> Callable[[State, np.float32, Batch], tuple[State, Array]]:
    """The jitted step (state, learning rate, batch) -> (state, loss); the state passed in is donated."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: State, learning_rate: Array, batch: Batch) -> tuple[State, Array]:
        value, gradients = jax.value_and_grad(loss)(state.params, batch)
        return updated(state, gradients, learning_rate), value

    return step


def updated(
    state: State, gradients: Params, learning_rate: Array, total: Callable[[Array], Array] = lambda own: own
) -> State:
    """The state after a step of AdamW with clipped gradients; `total`: of what each shard has a part of."""
    # A step of 16-bit weights computes in float32, as PyTorch's fused AdamW does.
    gradients, old_params, old_mean, old_variance = jax.tree.map(
        lambda value: value.astype(jnp.float32), (gradients, state.params, state.mean, state.variance)
    )
    norm = jnp.sqrt(total(sum(jnp.vdot(gradient, gradient) for gradient in gradients.values())))
    scale = jnp.minimum(1.0, MAX_NORM / (norm + 1e-6))
    count = state.step + 1
    correction1 = 1 - BETA1 ** count.astype(jnp.float32)
    correction2 = jnp.sqrt(1 - BETA2 ** count.astype(jnp.float32))
    params, mean, variance = {}, {}, {}
    for name, gradient in gradients.items():
        gradient = gradient * scale
        mean[name] = BETA1 * old_mean[name] + (1 - BETA1) * gradient
        variance[name] = BETA2 * old_variance[name] + (1 - BETA2) * gradient**2
        update = mean[name] / correction1 / (jnp.sqrt(variance[name]) / correction2 + EPSILON)
        kept = 1 - learning_rate * WEIGHT_DECAY
        params[name] = kept * old_params[name] - learning_rate * update
    new = State(params, mean, variance, count)
    return jax.tree.map(lambda now, before: now.astype(before.dtype), new, state)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over labels that are not ignored; logits (N, V), labels (N)."""
    logits, counted = logits.astype(jnp.float32), labels != IGNORED_LABEL
    own = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - own
    return jnp.sum(jnp.where(counted, losses, 0)) / jnp.sum(counted)


def mlp_loss(params: Params, batch: Batch) -> Array:
    """`nn.Sequential` of linear layers with ReLU between them; batch is images (N, inputs) and labels (N)."""
    hidden, labels = batch
    layers = sorted({int(name.split(".")[0]) for name in params})
    for layer in layers:
        hidden = hidden @ params[f"{layer}.weight"].T + params[f"{layer}.bias"]
        if layer != layers[-1]:
            hidden = jax.nn.relu(hidden)
    return cross_entropy(hidden, labels)


def llama_loss(config: LlamaConfig, implementation: str | None = None) -> Callable[[Params, Batch], Array]:
    """tputrain.models.Llama's loss; batch is tokens, labels, positions and document numbers, each (B, S).

    `implementation`: of `jax.nn.dot_product_attention`; without one attention is written out.
    """

    def rms_norm(hidden: Array, weight: Array) -> Array:
        return (
            hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + config.rms_norm_eps) * weight
        )

    def rotate(x: Array, cosine: Array, sine: Array) -> Array:
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate((first * cosine - second * sine, second * cosine + first * sine), axis=-1)

    def loss(params: Params, batch: Batch) -> Array:
        tokens, labels, positions, documents = batch
        B, S = tokens.shape
        K, D = config.num_key_value_heads, config.head_dim
        G = config.num_attention_heads // K
        frequencies = config.rope_theta ** (-np.arange(0, D, 2, dtype=np.float32) / D)
        angles = positions[:, :, None, None] * frequencies  # (B, S, 1, D / 2)
        dtype = params["model.embed_tokens.weight"].dtype
        cosine, sine = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
        may_attend = jnp.tril(jnp.ones((S, S), bool)) & (documents[:, :, None] == documents[:, None, :])
        may_attend = may_attend[:, None, None]  # (B, 1, 1, S, S)

        hidden = params["model.embed_tokens.weight"][tokens]
        for layer in range(config.num_hidden_layers):
            weight = partial(_weight, params, f"model.layers.{layer}.")
            normed = rms_norm(hidden, weight("input_layernorm"))
            query = rotate((normed @ weight("self_attn.q_proj").T).reshape(B, S, K * G, D), cosine, sine)
            key = rotate((normed @ weight("self_attn.k_proj").T).reshape(B, S, K, D), cosine, sine)
            value = (normed @ weight("self_attn.v_proj").T).reshape(B, S, K, D)
            if implementation is None:
                scores = jnp.einsum("bskgd,btkd->bkgst", query.reshape(B, S, K, G, D) * D**-0.5, key)
                attention = jax.nn.softmax(jnp.where(may_attend, scores, -jnp.inf), axis=-1)
                mixed = jnp.einsum("bkgst,btkd->bskgd", attention, value)
            else:
                mixed = jax.nn.dot_product_attention(
                    query, key, value, mask=may_attend[:, 0], implementation=implementation
                )
            hidden = hidden + mixed.reshape(B, S, K * G * D) @ weight("self_attn.o_proj").T
            normed = rms_norm(hidden, weight("post_attention_layernorm"))
            gated = jax.nn.silu(normed @ weight("mlp.gate_proj").T) * (normed @ weight("mlp.up_proj").T)
            hidden = hidden + gated @ weight("mlp.down_proj").T
        hidden = rms_norm(hidden, params["model.norm.weight"])
        output = params["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
        return cross_entropy((hidden @ output.T).reshape(B * S, -1), labels.reshape(-1))

    return loss


def _weight(params: Params, layer: str, name: str) -> Array:
    return params[f"{layer}{name}.weight"]
