"""Recurrent cells: the fused pointwise half of a step of ``nn.LSTM`` and ``nn.GRU``, and its derivative; and
layers of them, see `recurrent_layers.py`.

For a cell PyTorch computes ``input @ W_ih.T`` and ``hidden @ W_hh.T`` itself and hands over the products as
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

from tpu_backend.lowering.matmul import matmul
from tpu_backend.lowering.registry import lowering, opmath


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


@lowering("tpu::recurrent_layer")
def recurrent_layer(gates, hx, cx, weight, bias, is_there, cell, reverse):
    """A loop over the steps. States are rounded to their dtype at each, as those of single cells are."""
    wide = opmath(gates.dtype)
    nothing = jnp.zeros(0, hx.dtype)
    bias = None if bias is None else bias.astype(wide)

    def step(state, given):
        (h, c), (of_input, is_here) = state, given
        of_hidden = matmul(h, weight.T)
        of_input, old_h, old_c = of_input.astype(wide), h.astype(wide), c.astype(wide)
        kept, next_c = nothing, old_c
        if cell == "lstm":
            next_h, next_c, kept = lstm_cell(of_input, of_hidden, old_c, None, bias)
        elif cell == "gru":
            next_h, kept = gru_cell(of_input, of_hidden, old_h, None, bias)
        else:
            sums = of_input + _biased(of_hidden, bias)
            next_h = jnp.tanh(sums) if cell == "rnn_tanh" else jax.nn.relu(sums)
        h, c = (_where(is_here, new.astype(old.dtype), old) for new, old in ((next_h, h), (next_c, c)))
        return (h, c), (h, c, kept.astype(h.dtype))

    start = hx, nothing if cx is None else cx
    (hy, cy), (output, cells, kept) = jax.lax.scan(step, start, (gates, is_there), reverse=reverse)
    return output, hy, cy, cells if cell == "lstm" else nothing, kept if kept.size else nothing


@lowering("tpu::recurrent_layer_backward")
def recurrent_layer_backward(
    grad, grad_hy, grad_cy, hx, cx, weight, is_there, output, cells, kept, cell, reverse
):
    """The loop the other way. Gradients of states are carried in the accumulation dtype."""
    wide, dtype = opmath(grad.dtype), weight.dtype
    is_lstm = cell == "lstm"

    def before(states, first):
        """The state before each step."""
        first = first[None]
        return jnp.concatenate([states[1:], first] if reverse else [first, states[:-1]])

    h_before = before(output, hx)
    steps = {"grad": grad, "output": output, "is_here": is_there}
    steps |= {"c": cells, "c_before": before(cells, cx)} if is_lstm else {}
    steps |= {"kept": kept} if cell in ("lstm", "gru") else {}

    def step(carried, given):
        grad_h, grad_c = carried
        is_here = given.pop("is_here")
        given = {name: each.astype(wide) for name, each in given.items()}
        total, next_grad_c = grad_h + given["grad"], grad_c
        direct = jnp.zeros_like(total)
        if is_lstm:
            of_input, next_grad_c, _ = lstm_cell_backward(
                total, grad_c, given["c_before"], given["c"], given["kept"], False
            )
            of_hidden = of_input
        elif cell == "gru":
            of_input, of_hidden, direct, *_ = gru_cell_backward(total, given["kept"], False)
        else:
            h = given["output"]
            of_input = of_hidden = total * (1 - h * h) if cell == "rnn_tanh" else jnp.where(h > 0, total, 0)
        of_input, of_hidden = of_input.astype(dtype), of_hidden.astype(dtype)
        next_grad_h = direct + matmul(of_hidden, weight)
        # Where a sequence has no step its state went through.
        carried = _where(is_here, next_grad_h, total), _where(is_here, next_grad_c, grad_c)
        return carried, (_where(is_here, of_input, 0), _where(is_here, of_hidden, 0))

    start = grad_hy.astype(wide), grad_cy.astype(wide)
    (grad_hx, grad_cx), (of_input, of_hidden) = jax.lax.scan(step, start, steps, reverse=not reverse)
    rows = of_hidden.reshape(-1, of_hidden.shape[-1])
    grad_weight = matmul(rows.T, h_before.reshape(-1, h_before.shape[-1]))
    return of_input, grad_hx, grad_cx, grad_weight, rows.astype(wide).sum(0)


def _where(is_here, new, old):
    """`new` for the sequences that have this step; None: all have. (0,) is a state that the cell lacks."""
    return new if is_here is None or new.size == 0 else jnp.where(is_here[:, None], new, old)


def _biased(gates: jax.Array, bias: jax.Array | None) -> jax.Array:
    return gates if bias is None else gates + bias
