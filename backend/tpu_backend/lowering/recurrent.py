"""Recurrent cells: the fused pointwise half of a step of ``nn.LSTM`` and ``nn.GRU``, and its derivative.

PyTorch computes ``input @ W_ih.T`` and ``hidden @ W_hh.T`` itself and hands over the products as
``input_gates`` and ``hidden_gates``; formulas and workspaces as in ATen/native/cuda/RNN.cu.
For batch B and hidden size H

    LSTM   gates (B, 4H) in the order input, forget, cell, output;
           workspace (B, 4H): the gates after their activation
    GRU    gates (B, 3H) in the order reset, update, new;
           workspace (B, 5H): the gates after their activation, hx, and the hidden half of the new gate
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tpu_backend.lowering.registry import lowering


@lowering("_thnn_fused_lstm_cell", promote="opmath")
def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = _biased(input_gates, input_bias) + _biased(hidden_gates, hidden_bias)
    i, f, g, o = jnp.split(gates, 4, axis=1)
    i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
    cy = f * cx + i * g
    hy = o * jnp.tanh(cy)
    return hy, cy, jnp.concatenate([i, f, g, o], axis=1)


@lowering("_thnn_fused_lstm_cell_backward_impl", promote="opmath")
def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    """Either gradient may be undefined, which is zero; input and hidden gates share one gradient."""
    i, f, g, o = jnp.split(workspace, 4, axis=1)
    grad_hy = jnp.zeros_like(cy) if grad_hy is None else grad_hy
    grad_cy = jnp.zeros_like(cy) if grad_cy is None else grad_cy
    tanh_cy = jnp.tanh(cy)
    grad_c = grad_hy * o * (1 - tanh_cy * tanh_cy) + grad_cy
    grad_gates = jnp.concatenate(
        [
            grad_c * g * (1 - i) * i,
            grad_c * cx * (1 - f) * f,
            grad_c * i * (1 - g * g),
            grad_hy * tanh_cy * (1 - o) * o,
        ],
        axis=1,
    )
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


@lowering("_thnn_fused_gru_cell", promote="opmath")
def gru_cell(input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    input_r, input_z, input_n = jnp.split(_biased(input_gates, input_bias), 3, axis=1)
    hidden_r, hidden_z, hidden_n = jnp.split(_biased(hidden_gates, hidden_bias), 3, axis=1)
    r = jax.nn.sigmoid(input_r + hidden_r)
    z = jax.nn.sigmoid(input_z + hidden_z)
    n = jnp.tanh(input_n + r * hidden_n)
    return n + z * (hx - n), jnp.concatenate([r, z, n, hx, hidden_n], axis=1)


@lowering("_thnn_fused_gru_cell_backward", promote="opmath")
def gru_cell_backward(grad_hy, workspace, has_bias):
    r, z, n, hx, hidden_n = jnp.split(workspace, 5, axis=1)
    grad_n = grad_hy * (1 - z) * (1 - n * n)
    grad_z = grad_hy * (hx - n) * (1 - z) * z
    grad_r = grad_n * hidden_n * (1 - r) * r
    grad_input_gates = jnp.concatenate([grad_r, grad_z, grad_n], axis=1)
    grad_hidden_gates = jnp.concatenate([grad_r, grad_z, grad_n * r], axis=1)
    return (
        grad_input_gates,
        grad_hidden_gates,
        grad_hy * z,
        grad_input_gates.sum(0) if has_bias else None,
        grad_hidden_gates.sum(0) if has_bias else None,
    )


def _biased(gates: jax.Array, bias: jax.Array | None) -> jax.Array:
    return gates if bias is None else gates + bias
