"""Shape inference that PyTorch lacks: meta kernels of operators that it has only as CUDA has them.

The recorder asks an operator's meta kernel what comes out (csrc/signature.cpp); an operator without one runs
on the CPU, which for these is slow or impossible.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.library import Library


@cache
def register_meta_kernels() -> Library:
    """Give PyTorch the meta kernels below, for the life of the process.  Idempotent."""
    library = Library("aten", "IMPL")
    # PyTorch's own kernel reads the device of a bias that may be None: nn.LSTM(bias=False) would fail.
    library.impl("_thnn_fused_lstm_cell", _lstm_cell, "Meta", allow_override=True)
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    # PyTorch's own kernel knows bfloat16 alone, and strides of CUDA's kernel.
    library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
    return library


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


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The shapes of a product in groups that end at `offs` (G,): see the lowering in lowering/matmul.py."""
    shapes = f"{tuple(mat_a.shape)} and {tuple(mat_b.shape)}"
    torch._check(
        mat_a.dim() in (2, 3) and mat_b.dim() in (2, 3),
        lambda: f"grouped_mm: expected 2-d or 3-d matrices, got {shapes}",
    )
    torch._check(
        mat_a.dtype == mat_b.dtype, lambda: f"grouped_mm: got matrices of {mat_a.dtype} and {mat_b.dtype}"
    )
    torch._check(
        mat_a.size(-1) == mat_b.size(-2), lambda: f"grouped_mm: {shapes} do not fit: the inner sizes differ"
    )
    both_batched = mat_a.dim() == mat_b.dim() == 3
    torch._check(
        (offs is None) == both_batched,
        lambda: (
            f"grouped_mm: {shapes} {'take no offs' if both_batched else 'need offs, the end of each group'}"
        ),
    )
    batches = {matrix.size(0) for matrix in (mat_a, mat_b) if matrix.dim() == 3}
    if offs is not None:
        torch._check(
            offs.dim() == 1 and offs.dtype == torch.int32,
            lambda: f"grouped_mm: expected 1-d offs of torch.int32, got {offs.dim()}-d of {offs.dtype}",
        )
        batches.add(offs.size(0))
    torch._check(len(batches) == 1, lambda: f"grouped_mm: {shapes} and offs disagree: {batches} groups")
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    batch = () if mat_a.dim() != mat_b.dim() else tuple(batches)
    return mat_a.new_empty((*batch, rows, columns), dtype=out_dtype or mat_a.dtype)
