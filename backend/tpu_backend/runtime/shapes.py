"""Shape inference that PyTorch lacks: meta kernels of operators that it has for CUDA alone, or has wrong.

The recorder asks an operator's meta kernel what comes out (csrc/signature.cpp); an operator without one runs
on the CPU, and these have no CPU kernel either.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._decomp.decompositions import max_unpool2d
from torch._meta_registrations import _linalg_svd_meta
from torch._prims_common import suggest_memory_format
from torch.library import Library


@cache
def register_meta_kernels() -> Library:
    """Give PyTorch the meta kernels below, for the life of the process.  Idempotent."""
    library = Library("aten", "IMPL")
    # PyTorch's own kernel reads the device of a bias that may be None: nn.LSTM(bias=False) would fail.
    library.impl("_thnn_fused_lstm_cell", _lstm_cell, "Meta", allow_override=True)
    # PyTorch's own forgets the memory format, which the CPU's and CUDA's kernels keep.
    library.impl("max_unpool2d", _max_unpool2d, "Meta", allow_override=True)
    # PyTorch's own takes every meta tensor for a CUDA one, of which Vh lies by rows.
    library.impl("_linalg_svd", _linalg_svd, "Meta", allow_override=True)
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    return library


def _max_unpool2d(self: Tensor, indices: Tensor, output_size: list[int]) -> Tensor:
    """A plane of ``output_size`` for each channel of (C, H, W) or (N, C, H, W)."""
    unpooled = max_unpool2d(self, indices, output_size)
    return unpooled.contiguous(memory_format=suggest_memory_format(self)) if self.dim() == 4 else unpooled


def _linalg_svd(
    A: Tensor, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., m, k), S (..., k) and Vh (..., k, n) of (..., m, n), U and Vh by columns as in LAPACK."""
    u, s, vh = _linalg_svd_meta(A, full_matrices, compute_uv, driver)
    if compute_uv:
        vh = vh.new_empty(vh.mT.shape).mT
    return u, s, vh


def _lstm_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    cx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gates (B, 4H) and cx (B, H) give hy and cy (B, H) and the workspace (B, 4H)."""
    _check_gates("LSTM", 4, input_gates, hidden_gates, cx, input_bias, hidden_bias)
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


def _gru_cell(
    input_gates: Tensor,
    hidden_gates: Tensor,
    hx: Tensor,
    input_bias: Tensor | None = None,
    hidden_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gates (B, 3H) and hx (B, H) give hy (B, H) and the workspace (B, 5H)."""
    _check_gates("GRU", 3, input_gates, hidden_gates, hx, input_bias, hidden_bias)
    batch, hidden = hx.shape
    return hx.new_empty(hx.shape), hx.new_empty(batch, 5 * hidden)


def _gru_cell_backward(
    grad_hy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of both gates (B, 3H), of hx (B, H) and of both biases (3H,), None without biases."""
    batch, hidden = grad_hy.shape
    torch._check(
        workspace.shape == (batch, 5 * hidden),
        lambda: (
            f"GRU cell backward: expected a workspace of {(batch, 5 * hidden)}, got {tuple(workspace.shape)}"
        ),
    )

    def grad_gates() -> Tensor:
        return workspace.new_empty(batch, 3 * hidden)

    def grad_bias() -> Tensor | None:
        return workspace.new_empty(3 * hidden) if has_bias else None

    return grad_gates(), grad_gates(), grad_hy.new_empty(grad_hy.shape), grad_bias(), grad_bias()


def _check_gates(
    cell: str,
    num_gates: int,
    input_gates: Tensor,
    hidden_gates: Tensor,
    state: Tensor,
    input_bias: Tensor | None,
    hidden_bias: Tensor | None,
) -> None:
    """RuntimeError unless state (B, H), gates (B, num_gates * H) and biases, if any, fit together."""
    torch._check(state.dim() == 2, lambda: f"{cell} cell: expected a 2-d state, got {tuple(state.shape)}")
    batch, hidden = state.shape
    expected = (batch, num_gates * hidden)
    for name, gates in (("input", input_gates), ("hidden", hidden_gates)):
        torch._check(
            gates.shape == expected,
            lambda name=name, gates=gates: (
                f"{cell} cell: a state of {(batch, hidden)} needs {name} gates of {expected}, "
                f"got {tuple(gates.shape)}"
            ),
        )
    torch._check(
        (input_bias is None) == (hidden_bias is None),
        lambda: f"{cell} cell: give both biases or neither",
    )
    for name, bias in (("input", input_bias), ("hidden", hidden_bias)):
        torch._check(
            bias is None or bias.shape == expected[1:],
            lambda name=name, bias=bias: (
                f"{cell} cell: expected {name} bias of shape {expected[1:]}, got {tuple(bias.shape)}"
            ),
        )
