"""Which dtypes PyTorch's own kernels take: XLA would compute, where PyTorch raises.

An operator that is not listed takes all dtypes, or its meta kernel refuses what it does not take. A call that
is refused runs on the CPU, whose kernel raises in PyTorch's words. ``tests/backend/test_refused_dtypes.py``
compares this table with the CPU over PyTorch's operator database.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Kind = Literal["any", "numbers", "nowhere bool", "floats", "floats, uint8", "floats, int64"]

# fmt: off
_OPERATORS: dict[Kind, str] = {
    # Every dtype but bool.
    "numbers": """
        abs addbmm addcmul addmm addmv argmax argmin baddbmm bmm bucketize.Scalar bucketize.Tensor ceil clamp
        clamp.Tensor clamp_max clamp_max.Tensor clamp_min clamp_min.Tensor convolution div.Scalar_mode
        div.Tensor_mode dot floor floor_divide floor_divide.Scalar fmod.Scalar fmod.Tensor geometric
        hardtanh index_reduce isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor kthvalue linalg_cross
        max_pool2d_with_indices max_pool3d_with_indices median median.dim mm mv mvlgamma nanmedian
        nanmedian.dim neg pow.Tensor_Tensor pow.Scalar reflection_pad1d reflection_pad2d reflection_pad3d relu
        remainder.Scalar remainder.Scalar_Tensor remainder.Tensor replication_pad1d replication_pad2d
        replication_pad3d round searchsorted.Scalar searchsorted.Tensor threshold topk trace trunc vdot
    """,
    # No argument may be bool, not even a number.
    "nowhere bool": "sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar _foreach_sub.Scalar",
    "floats": """
        _adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update_functional _cdist_forward
        _ctc_loss.Tensor _embedding_bag _embedding_bag_forward_only _histogramdd_bin_edges
        _histogramdd_from_bin_tensors _log_softmax
        _native_batch_norm_legit_functional _prelu_kernel _safe_softmax _softmax adaptive_max_pool2d
        adaptive_max_pool3d addcdiv bernoulli binary_cross_entropy binary_cross_entropy_with_logits cauchy
        celu elu embedding_renorm exponential frac gelu glu grid_sampler_2d grid_sampler_3d hardshrink
        hardsigmoid hardswish histogram.bin_ct histogram.bins_tensor huber_loss hypot igamma igammac
        leaky_relu
        lerp.Scalar lerp.Tensor log_normal log_sigmoid_forward logaddexp logaddexp2 logcumsumexp max_unpool2d
        max_unpool3d mish mse_loss multi_margin_loss multilabel_margin_loss_forward multinomial
        native_group_norm native_layer_norm nextafter nll_loss2d_forward nll_loss_forward normal.Tensor_Tensor
        normal.Tensor_float normal.float_Tensor normal_functional renorm round.decimals
        rrelu_with_noise_functional segment_reduce silu smooth_l1_loss soft_margin_loss softplus softshrink
        std.correction std_mean.correction uniform upsample_linear1d upsample_trilinear3d var.correction
        var_mean.correction
    """,
    "floats, uint8": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
    """,
    "floats, int64": "avg_pool2d avg_pool3d",
}
# fmt: on

KINDS: dict[str, Kind] = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}


def is_of_kind(dtype: np.dtype, kind: Kind) -> bool:
    """Whether a dtype is one that an operator of this kind computes in."""
    if kind in ("any", "numbers", "nowhere bool"):
        return kind == "any" or dtype != np.bool_
    is_integral = dtype == np.bool_ or np.issubdtype(dtype, np.integer)
    return not is_integral or (kind != "floats" and dtype.name == kind.removeprefix("floats, "))
