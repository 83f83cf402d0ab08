"""The JAX step for a slice trains the model that ours is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from tests.benchmarks.jax_reference import Params
from tests.benchmarks.jax_slice import (
    CHIPS,
    EMBEDDING,
    HEAD,
    LAST_NORM,
    REPLICAS,
    SliceStep,
    loss_of,
    parameter_shapes,
)
from tputrain.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(64, 32, 48, 2, 4, 2, 8, 32, tie_word_embeddings=False)
NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def stacked(tensors: dict[str, torch.Tensor]) -> Params:
    """Of the PyTorch model, under the step's names and in its shapes."""
    found = {EMBEDDING: tensors["model.embed_tokens.weight"], LAST_NORM: tensors["model.norm.weight"]}
    found[HEAD] = tensors["lm_head.weight"]
    for name, of_torch in NAMES.items():
        layers = [tensors[f"model.layers.{layer}.{of_torch}.weight"] for layer in range(2)]
        found[name] = torch.stack([each.T if each.ndim == 2 else each for each in layers])
    return {name: jnp.asarray(each.detach().numpy()) for name, each in found.items()}


def test_loss_and_gradients_are_those_of_our_llama() -> None:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    tokens, labels = torch.randint(64, (2, 2, 16))
    expected = model(tokens, labels)
    expected.backward()
    step = SliceStep(CONFIG, "v5e:1x1", 2, 16, recomputes=True, block_of_loss=8)
    params = stacked(dict(model.named_parameters()))
    assert {name: each.shape for name, each in params.items()} == parameter_shapes(CONFIG)
    loss = loss_of(step, Mesh(np.array(jax.devices()[:1]).reshape(1, 1), (REPLICAS, CHIPS)))
    with jax.enable_x64(False):
        batch = (jnp.asarray(tokens.numpy(), jnp.int32), jnp.asarray(labels.numpy(), jnp.int32))
        value, gradients = jax.jit(jax.value_and_grad(loss))(params, batch)
    assert float(value) == pytest.approx(expected.item(), rel=1e-2)  # products are in bfloat16
    grads = stacked({name: each.grad for name, each in model.named_parameters()})
    for name, gradient in gradients.items():
        error = jnp.linalg.norm(gradient - grads[name]) / jnp.linalg.norm(grads[name])
        assert error < 0.03, name
