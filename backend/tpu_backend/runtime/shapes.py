"""Shape inference that PyTorch lacks: meta kernels of operators that it has for its own devices alone, or
has wrong.

The recorder asks an operator's meta kernel what comes out (csrc/record/signature.cpp). An operator without
one runs on the CPU. Arguments that an operator refuses raise ``NotImplementedError`` here where it has a CPU
kernel: then that one is asked, and says what is wrong in PyTorch's words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._decomp.decompositions import max_unpool2d, multilabel_margin_loss_forward
from torch._meta_registrations import _exec_fft, _linalg_svd_meta, _sort_dims
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library
from torch.types import Number


@cache
def register_meta_kernels() -> Library:
    """Give PyTorch the meta kernels below, for the life of the process.  Idempotent."""
    library = Library("aten", "IMPL")
    # PyTorch's own keep statistics in float32 as CUDA's kernels do; the CPU keeps 16-bit ones in 16 bit.
    for name in _NORMALIZATIONS:
        library.impl(name, _keeping_statistics(name), "Meta", allow_override=True)
    for name, meta_kernel in _INSTEAD.items():
        library.impl(name, meta_kernel, "Meta", allow_override=True)
        _infer_under_torch_compile(name, meta_kernel)
    library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
    for name, like_cpu in _LIKE_CPU.items():
        library.impl(name, like_cpu, "Meta")
    return library


def _check(holds: bool | torch.SymBool, message: Callable[..., str] | None = None) -> None:
    """`torch._check` without its import of sympy, half a second of a script's start."""
    if not holds:
        raise RuntimeError("arguments that do not fit together" if message is None else message())


def _infer_under_torch_compile(name: str, kernel: Callable[..., Any]) -> None:
    """Have `kernel` say what comes out of fake tensors of this device, too: tracing prefers PyTorch's meta
    kernels in Python to the dispatcher's.
    """
    operator, _, overload = name.partition(".")

    @register_op_impl(getattr(getattr(torch.ops.aten, operator), overload or "default"))
    def infer(mode: FakeTensorMode, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        if all(each.device.type != "tpu" for each in given):
            return NotImplemented
        with mode:
            return kernel(*args, **kwargs)


# Each returns the normalised input, its mean and its reciprocal deviation, then what is not described here.
_NORMALIZATIONS = (
    "native_layer_norm",
    "native_group_norm",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit.no_stats",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_batch_norm_no_update",
)


def _keeping_statistics(name: str) -> Callable[..., tuple[Tensor, ...]]:
    """PyTorch's own inference, but mean and reciprocal deviation are of the dtype of the parameters, and of
    the input's where there are none."""
    operator, _, overload = name.partition(".")
    infer = decomposition_table[getattr(getattr(torch.ops.aten, operator), overload or "default")]

    def kernel(input: Tensor, *others: Any, **keywords: Any) -> tuple[Tensor, ...]:
        result, mean, deviation, *rest = infer(input, *others, **keywords)
        parameters = [each for each in (*others, *keywords.values()) if isinstance(each, Tensor)]
        kept = (parameters or [input])[0].dtype
        return result, mean.to(kept), deviation.to(kept), *rest

    return kernel


def _pow(self: Tensor | Number, exponent: Tensor | Number) -> Tensor:
    """Of truth values the CPU has powers by one number alone, which are truth values, too."""
    of_truth = all(
        each.dtype == torch.bool if isinstance(each, Tensor) else isinstance(each, bool)
        for each in (self, exponent)
    )
    if not of_truth:
        return decomposition_table[torch.ops.aten.pow.Tensor_Tensor](self, exponent)
    if isinstance(exponent, Tensor) or not isinstance(self, Tensor):
        raise NotImplementedError("\"pow\" not implemented for 'Bool'")
    return torch.empty_like(self)


def _max_unpool2d(self: Tensor, indices: Tensor, output_size: list[int]) -> Tensor:
    """A plane of ``output_size`` for each channel of (C, H, W) or (N, C, H, W)."""
    unpooled = max_unpool2d(self, indices, output_size)
    return unpooled.contiguous(memory_format=suggest_memory_format(self)) if self.dim() == 4 else unpooled


def _fft_r2c(self: Tensor, dim: list[int], normalization: int, onesided: bool) -> Tensor:
    """Half of the last transformed dim where onesided, n // 2 + 1; dims lie as MKL leaves them."""
    _check(self.is_floating_point())
    sizes = list(self.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    transformed = self.new_empty(sizes, dtype=self.dtype.to_complex())
    return _exec_fft(transformed, self, sizes, _sort_dims(self, dim, exclude_last=True), forward=True)


def _fft_c2r(self: Tensor, dim: list[int], normalization: int, last_dim_size: int) -> Tensor:
    """``last_dim_size`` long in the last transformed dim, which comes after all others."""
    _check(self.is_complex())
    if dim[:-1]:
        others = _sort_dims(self, dim[:-1])
        self = _exec_fft(self.new_empty(self.shape), self, self.shape, others, forward=False)
    sizes = list(self.shape)
    sizes[dim[-1]] = last_dim_size
    real = self.new_empty(sizes, dtype=self.dtype.to_real())
    return _exec_fft(real, self, sizes, dim[-1:], forward=False)


def _multilabel_margin_loss(self: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Losses () or, with reduction 0, (N,) of scores (C,) or (N, C); and where the classes are targets."""
    loss, is_target = multilabel_margin_loss_forward(self, target, reduction)
    return loss.reshape(()) if self.dim() < 2 else loss, is_target


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
    _check(
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
    _check(state.dim() == 2, lambda: f"{cell} cell: expected a 2-d state, got {tuple(state.shape)}")
    batch, hidden = state.shape
    expected = (batch, num_gates * hidden)
    for name, gates in (("input", input_gates), ("hidden", hidden_gates)):
        _check(
            gates.shape == expected,
            lambda name=name, gates=gates: (
                f"{cell} cell: a state of {(batch, hidden)} needs {name} gates of {expected}, "
                f"got {tuple(gates.shape)}"
            ),
        )
    _check(
        (input_bias is None) == (hidden_bias is None),
        lambda: f"{cell} cell: give both biases or neither",
    )
    for name, bias in (("input", input_bias), ("hidden", hidden_bias)):
        _check(
            bias is None or bias.shape == expected[1:],
            lambda name=name, bias=bias: (
                f"{cell} cell: expected {name} bias of shape {expected[1:]}, got {tuple(bias.shape)}"
            ),
        )


# ---- operators that have a CPU kernel


def _expect(condition: bool) -> None:
    if not condition:
        raise NotImplementedError("arguments that the CPU kernel refuses")


def _like_self(grad_output: Tensor, self: Tensor, *_: object, **__: object) -> Tensor:
    """The gradient of ``self``."""
    return self.new_empty(self.shape)


def _histogram(
    self: Tensor,
    bins: int = 100,
    *,
    range: list[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> tuple[Tensor, Tensor]:
    """Counts (bins,) and edges (bins + 1,)."""
    _expect(bins > 0 and (range is None or (len(range) == 2 and range[0] <= range[1])))
    _expect(self.is_floating_point() and (weight is None or _weighs(weight, self)))
    return self.new_empty(bins), self.new_empty(bins + 1)


def _weighs(weight: Tensor, values: Tensor) -> bool:
    return weight.shape == values.shape and weight.dtype == values.dtype


def _histogram_between(
    self: Tensor, bins: Tensor, *, weight: Tensor | None = None, density: bool = False
) -> tuple[Tensor, Tensor]:
    """Counts (edges - 1,) and the edges themselves."""
    _expect(bins.dim() == 1 and bins.numel() > 0 and bins.dtype == self.dtype)
    _expect(self.is_floating_point() and (weight is None or _weighs(weight, self)))
    return self.new_empty(bins.numel() - 1), self.new_empty(bins.numel())


def _expect_points(self: Tensor, num_axes: int, weight: Tensor | None) -> None:
    """N points of ``num_axes`` coordinates, (..., D), and a weight for each."""
    _expect(self.is_floating_point() and self.dim() >= 2 and self.shape[-1] == num_axes)
    _expect(weight is None or (weight.shape == self.shape[:-1] and weight.dtype == self.dtype))


def _histogramdd_edges(
    self: Tensor,
    bins: list[int],
    *,
    range: list[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    _expect_points(self, len(bins), weight)
    _expect(all(count > 0 for count in bins) and (range is None or len(range) == 2 * len(bins)))
    return [self.new_empty(count + 1) for count in bins]


def _histogramdd(
    self: Tensor,
    bins: list[int],
    *,
    range: list[float] | None = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> Tensor:
    _expect_points(self, len(bins), weight)
    _expect(all(count > 0 for count in bins) and (range is None or len(range) == 2 * len(bins)))
    return self.new_empty(bins)


def _histogramdd_between(
    self: Tensor, bins: list[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    _expect_points(self, len(bins), weight)
    _expect(all(edges.dim() == 1 and edges.numel() > 1 and edges.dtype == self.dtype for edges in bins))
    return self.new_empty([edges.numel() - 1 for edges in bins])


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    """Losses (B,) and alpha (B, T, 2S + 1) of log_probs (T, B, C) and targets (B, S)."""
    _expect(log_probs.dim() == 3 and log_probs.is_floating_point() and targets.dim() == 2)
    steps, batch, classes = log_probs.shape
    _expect(steps > 0 and targets.shape[0] == batch and 0 <= blank < classes)
    _expect(input_lengths.shape == target_lengths.shape == (batch,))
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * targets.shape[1] + 1)


def _ctc_loss_backward(grad: Tensor, log_probs: Tensor, *_: object, **__: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _geqrf(self: Tensor) -> tuple[Tensor, Tensor]:
    """Reflectors (..., m, n) in LAPACK's column-major order, and their scales (..., min(m, n))."""
    _expect(self.dim() >= 2 and (self.is_floating_point() or self.is_complex()))
    rank = min(self.shape[-2:])
    return self.new_empty(self.mT.shape).mT, self.new_empty(*self.shape[:-2], rank)


def _lstsq(
    self: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Solution (..., n, k), residuals (..., k), rank (...), singular values; (0,) for what a driver lacks."""
    solution, residuals, rank, values = lstsq_results(self, b, driver)
    columns = self.shape[-1]
    solution = solution[..., :columns] if _is_vector(self, b) else solution.narrow(-2, 0, columns)
    return solution, residuals if driver == "gels" else residuals.new_empty(0), rank, values


def lstsq_results(self: Tensor, b: Tensor, driver: str | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``_lstsq``, but the solution as LAPACK writes it over b: in column-major order, as long as the
    longer of both; and residuals of every tall matrix."""
    _expect(self.dim() >= 2 and b.dim() >= 1 and self.dtype == b.dtype)
    _expect(driver in (None, "gels", "gelsy", "gelsd", "gelss"))
    batch, (rows, columns) = self.shape[:-2], self.shape[-2:]
    is_vector = _is_vector(self, b)
    right = b.unsqueeze(-1) if is_vector else b
    _expect(right.shape[:-2] == batch and right.shape[-2] == rows and min(rows, columns) > 0)
    count = right.shape[-1]
    solution = self.new_empty(*batch, count, max(rows, columns)).mT
    real = self.real if self.is_complex() else self
    residuals_shape = (*batch, *(() if is_vector else (count,))) if rows > columns else (0,)
    has_values = driver in ("gelsd", "gelss")
    return (
        solution.squeeze(-1) if is_vector else solution,
        real.new_empty(residuals_shape),
        self.new_empty(0 if driver == "gels" else batch, dtype=torch.int64),
        real.new_empty((*batch, min(rows, columns)) if has_values else 0),
    )


def _is_vector(self: Tensor, b: Tensor) -> bool:
    """Whether linalg.lstsq takes ``b`` for vectors."""
    return b.dim() == 1 or (b.dim() == self.dim() - 1 and b.shape == self.shape[:-1])


def _sample_dirichlet(self: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """A draw for each row of concentrations."""
    _expect(self.is_floating_point() and self.dim() > 0)
    return self.new_empty(self.shape)


def _binomial(count: Tensor, prob: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw an element of `count` and `prob`, expanded to one shape."""
    if not count.is_floating_point() or prob.dtype != count.dtype:
        raise NotImplementedError
    return count.new_empty(torch.broadcast_shapes(count.shape, prob.shape))


def _masked_softmax(
    self: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None
) -> Tensor:
    """(B, heads, L, L) with a mask (L, L) for mask_type 0, (B, L) for 1; any shape, the mask's too, for 2."""
    expected = [self.shape[2:], (self.shape[0], self.shape[-1]), self.shape]
    is_square = self.dim() == 4 and self.shape[2] == self.shape[3]
    if mask_type not in (0, 1, 2) or (mask_type != 2 and not is_square) or not self.is_floating_point():
        raise NotImplementedError
    if mask.shape != expected[mask_type] or mask.dtype != torch.bool:
        raise NotImplementedError
    return self.new_empty(self.shape)


def _padded_to_jagged(dense: Tensor, offsets: list[Tensor], total_L: int | None = None) -> Tensor:
    """Without `total_L` the last offset is the size, which only the CPU's kernel can read."""
    if total_L is None or len(offsets) != 1 or dense.dim() < 2:
        raise NotImplementedError
    return dense.new_empty((total_L, *dense.shape[2:]))


_LIKE_CPU = {
    "_padded_dense_to_jagged_forward": _padded_to_jagged,
    "_masked_softmax": _masked_softmax,
    "binomial": _binomial,
    "_sample_dirichlet": _sample_dirichlet,
    "multi_margin_loss_backward": _like_self,
    "multilabel_margin_loss_backward": _like_self,
    "fractional_max_pool3d_backward": _like_self,
    "histogram.bin_ct": _histogram,
    "histogram.bins_tensor": _histogram_between,
    "_histogramdd_bin_edges": _histogramdd_edges,
    "_histogramdd_from_bin_cts": _histogramdd,
    "_histogramdd_from_bin_tensors": _histogramdd_between,
    "_ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward.Tensor": _ctc_loss_backward,
    "geqrf": _geqrf,
    "linalg_lstsq": _lstsq,
}


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The shapes of a product in groups that end at `offs` (G,): see the lowering in lowering/matmul.py."""
    shapes = f"{tuple(mat_a.shape)} and {tuple(mat_b.shape)}"
    _check(
        mat_a.dim() in (2, 3) and mat_b.dim() in (2, 3),
        lambda: f"grouped_mm: expected 2-d or 3-d matrices, got {shapes}",
    )
    _check(mat_a.dtype == mat_b.dtype, lambda: f"grouped_mm: got matrices of {mat_a.dtype} and {mat_b.dtype}")
    _check(
        mat_a.size(-1) == mat_b.size(-2), lambda: f"grouped_mm: {shapes} do not fit: the inner sizes differ"
    )
    both_batched = mat_a.dim() == mat_b.dim() == 3
    _check(
        (offs is None) == both_batched,
        lambda: (
            f"grouped_mm: {shapes} {'take no offs' if both_batched else 'need offs, the end of each group'}"
        ),
    )
    batches = {matrix.size(0) for matrix in (mat_a, mat_b) if matrix.dim() == 3}
    if offs is not None:
        _check(
            offs.dim() == 1 and offs.dtype == torch.int32,
            lambda: f"grouped_mm: expected 1-d offs of torch.int32, got {offs.dim()}-d of {offs.dtype}",
        )
        batches.add(offs.size(0))
    _check(len(batches) == 1, lambda: f"grouped_mm: {shapes} and offs disagree: {batches} groups")
    rows, columns = mat_a.size(-2), mat_b.size(-1)
    batch = () if mat_a.dim() != mat_b.dim() else tuple(batches)
    return mat_a.new_empty((*batch, rows, columns), dtype=out_dtype or mat_a.dtype)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Results (B, H, L, E) that lie as the query does, log sums (B, H, L), and seed and offset of dropout.

    There is none, but DTensor's rule for the backward counts them.
    """
    shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value))
    _check(
        query.dim() == key.dim() == value.dim() == 4, lambda: f"attention: expected 4-d tensors, got {shapes}"
    )
    _check(
        query.dtype == key.dtype == value.dtype and query.is_floating_point(),
        lambda: f"attention: expected one dtype of floats, got {query.dtype}, {key.dtype} and {value.dtype}",
    )
    _check(
        query.size(3) == key.size(3)
        and key.size(2) == value.size(2)
        and query.size(0) == key.size(0) == value.size(0)
        and query.size(1) % key.size(1) == query.size(1) % value.size(1) == 0,
        lambda: f"attention: query, key and value do not fit: {shapes}",
    )
    _check(dropout_p == 0, lambda: f"attention: dropout_p={dropout_p} is not part of this operator")
    batch, heads, queries, _ = query.shape
    heads_innermost = 0 < query.stride(1) < query.stride(2)
    order = (0, 2, 1, 3) if heads_innermost else (0, 1, 2, 3)
    output_shape = (batch, heads, queries, value.size(3))
    return (
        torch.empty_permuted(output_shape, order, dtype=query.dtype, device=query.device),
        query.new_empty(
            (batch, heads, queries if compute_log_sumexp else 0),
            dtype=torch.promote_types(query.dtype, torch.float32),
        ),
        query.new_empty((), dtype=torch.int64),
        query.new_empty((), dtype=torch.int64),
    )


def _attention_backward(
    grad_out_: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients, all heads of a position beside each other as in the CPU's."""

    def gradient(tensor: Tensor, is_wanted: bool) -> Tensor | None:
        if not is_wanted:
            return None
        return torch.empty_permuted(tensor.shape, (0, 2, 1, 3), dtype=tensor.dtype, device=tensor.device)

    of_bias = None
    if attn_bias is not None and grad_input_mask[3]:
        of_bias = attn_bias.new_empty(attn_bias.shape)
    return *(gradient(*each) for each in zip((query, key, value), grad_input_mask)), of_bias


def _linear_backward(
    self: Tensor | None, grad_output: Tensor, weight: Tensor | None, output_mask: list[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients of the input, of the weight and of the bias, each where it is wanted."""
    of_input = of_weight = of_bias = None
    if output_mask[0]:
        assert weight is not None
        of_input = grad_output.new_empty((*grad_output.shape[:-1], weight.size(1)))
    if output_mask[1]:
        assert self is not None
        of_weight = grad_output.new_empty((grad_output.size(-1), self.size(-1)))
    if output_mask[2]:
        of_bias = grad_output.new_empty(grad_output.size(-1))
    return of_input, of_weight, of_bias


# Where PyTorch's own meta kernel is wrong for this device.
_INSTEAD: dict[str, Callable[..., Any]] = {
    # It reads the device of a bias that may be None: nn.LSTM(bias=False) would fail.
    "_thnn_fused_lstm_cell": _lstm_cell,
    # It forgets the memory format, which the CPU's and CUDA's kernels keep.
    "max_unpool2d": _max_unpool2d,
    # It takes every meta tensor for a CUDA one, of which Vh lies by rows.
    "_linalg_svd": _linalg_svd,
    # These lie in the order of CUDA's.
    "_fft_r2c": _fft_r2c,
    "_fft_c2r": _fft_c2r,
    # It says (1,) for the loss of a single sample, which has no dims.
    "multilabel_margin_loss_forward": _multilabel_margin_loss,
    # It says int64 for powers of truth values. In place and into a result they run on the CPU.
    **dict.fromkeys(("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar"), _pow),
    # It asks for what no wanted gradient needs, and makes those of weight and bias together.
    "linear_backward": _linear_backward,
    # It knows bfloat16 alone, and strides of CUDA's kernel.
    "_grouped_mm": _grouped_mm,
    # They say what CUDA's kernels do: float32 log sums of float64, padded to 32.
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
}
