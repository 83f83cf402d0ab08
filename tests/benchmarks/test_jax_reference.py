"""The yardstick measures the same thing: the hand-written JAX step and PyTorch's give the same losses."""

import dataclasses

import numpy as np
import pytest

from tests.benchmarks import jax_reference, torch_step

TINY_LLAMA = dataclasses.replace(
    torch_step.LLAMA, vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8
)


def losses_of_both(model, torch_loss, jax_loss, batch, steps=6):
    state = jax_reference.initial_state(model)
    jax_step = jax_reference.training_step(jax_loss)
    step = torch_step.TrainingStep(model, torch_loss, batch, "cpu")
    small = tuple(array.astype(np.int32) if array.dtype == np.int64 else array for array in batch)
    theirs, ours = [], []
    for number in range(steps):
        state, value = jax_step(state, np.float32(torch_step.learning_rate(number)), small)
        theirs.append(float(value))
        ours.append(float(step()))
    return theirs, ours


def test_the_mlp_step_in_jax_gives_pytorch_s_losses():
    theirs, ours = losses_of_both(
        torch_step.mlp(), torch_step.mlp_loss, jax_reference.mlp_loss, torch_step.mlp_batch(16)
    )
    assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_the_llama_step_in_jax_gives_pytorch_s_losses(tied):
    config = dataclasses.replace(TINY_LLAMA, tie_word_embeddings=tied)
    theirs, ours = losses_of_both(
        torch_step.llama(config),
        torch_step.llama_loss,
        jax_reference.llama_loss(config),
        torch_step.llama_batch(config, size=2, length=24),
    )
    assert theirs == pytest.approx(ours, rel=1e-4)
    assert theirs[-1] < theirs[0]
