"""Which dtypes PyTorch's own kernels take: XLA would compute, where PyTorch raises.

An operator that is not listed takes all dtypes, or its meta kernel refuses what it does not take. A call that
is refused runs on the CPU, whose kernel raises in PyTorch's words. ``test_the_kinds_are_those_of_the_cpu`` in
``tests/backend/test_integers.py`` compares this table with the CPU over PyTorch's operator database.
What only the CPU refuses and other devices compute is not refused here: 16-bit floats of avg_pool3d, say.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Kind = Literal[
    "any",
    "numbers",
    "nowhere bool",
    "real",
    "real numbers",
    "integers",
    "inexact",
    "inexact, bool",
    "floats",
    "floats, uint8",
    "floats, int64",
    "wide floats",
    "wide inexact",
]

# fmt: off
_OPERATORS: dict[Kind, str] = {
    # Every dtype but bool.
    "numbers": """
        abs addbmm addcmul addmm addmv baddbmm bmm convolution cumprod cumsum dot index_reduce
        linalg_cross mm mv neg pow.Scalar pow.Tensor_Tensor reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d searchsorted.Scalar searchsorted.Tensor trace
        vdot
    """,
    # No argument may be bool, not even a number.
    "nowhere bool": "sub.Tensor sub.Scalar rsub.Tensor rsub.Scalar _foreach_sub.Scalar",
    # Every dtype but complex ones.
    "real": """
        amax amin aminmax atan2 bernoulli.Tensor bernoulli.p clamp_max.Tensor clamp_min.Tensor
        copysign.Scalar copysign.Tensor cummax cummin deg2rad digamma erf erfc erfinv fmax fmin
        fractional_max_pool2d fractional_max_pool3d frexp.Tensor
        ge.Scalar ge.Tensor gt.Scalar gt.Tensor hash_tensor heaviside i0 isneginf isposinf le.Scalar
        le.Tensor lgamma logit lt.Scalar lt.Tensor max max.dim maximum min min.dim minimum mode nansum
        polygamma rad2deg sign signbit sort sort.stable special_entr special_i0e special_i1 special_i1e
        special_xlog1py special_xlog1py.other_scalar special_xlog1py.self_scalar xlogy.Scalar_Other
        xlogy.Scalar_Self xlogy.Tensor
    """,
    "real numbers": """
        argmax argmin bucketize.Scalar bucketize.Tensor ceil clamp clamp.Tensor clamp_max
        clamp_min div.Scalar_mode div.Tensor_mode floor floor_divide floor_divide.Scalar
        fmod.Scalar fmod.Tensor geometric hardtanh isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor
        kthvalue max_pool2d_with_indices max_pool3d_with_indices median median.dim mvlgamma nanmedian
        nanmedian.dim relu remainder.Scalar remainder.Scalar_Tensor remainder.Tensor round threshold topk
        trunc
    """,
    "integers": "gcd lcm",
    # Floats and complex numbers.
    "inexact": """
        addcdiv embedding_renorm lerp.Scalar lerp.Tensor logaddexp logcumsumexp normal.Tensor_Tensor
        normal.Tensor_float normal.float_Tensor normal_functional renorm silu std.correction
        std_mean.correction uniform var.correction var_mean.correction
    """,
    "inexact, bool": "im2col",
    "floats": """
        _adaptive_avg_pool2d _adaptive_avg_pool3d _batch_norm_with_update_functional _embedding_bag
        _embedding_bag_forward_only _histogramdd_from_bin_tensors _log_softmax
        _native_batch_norm_legit_functional _prelu_kernel _safe_softmax _softmax adaptive_max_pool2d
        adaptive_max_pool3d bernoulli binary_cross_entropy binary_cross_entropy_with_logits cauchy
        celu elu exponential frac gelu glu grid_sampler_2d grid_sampler_3d hardshrink hardsigmoid
        hardswish histogram.bins_tensor huber_loss hypot igamma igammac leaky_relu log_normal
        log_sigmoid_forward logaddexp2 max_unpool2d max_unpool3d mish mse_loss multi_margin_loss
        multilabel_margin_loss_forward multinomial native_group_norm native_layer_norm nextafter
        nll_loss2d_forward nll_loss_backward nll_loss_forward round.decimals
        rrelu_with_noise_functional segment_reduce smooth_l1_loss soft_margin_loss softplus softshrink
        upsample_linear1d upsample_trilinear3d
    """,
    "floats, uint8": """
        _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa _upsample_nearest_exact1d
        _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d
        upsample_nearest1d upsample_nearest2d upsample_nearest3d
    """,
    "floats, int64": "avg_pool2d avg_pool3d",
    # float32 and float64, to which integers are promoted.
    "wide floats": """
        _cdist_forward _ctc_loss.Tensor _histogramdd_bin_edges histogram.bin_ct special_airy_ai
        special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta special_zeta.other_scalar
        special_zeta.self_scalar
    """,
    # These, and complex numbers of them.
    "wide inexact": "linalg_lu_factor_ex",
}
_POLYNOMIALS = """
    chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
    hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
    shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
    shifted_chebyshev_polynomial_w
"""
# fmt: on

KINDS: dict[str, Kind] = {name: kind for kind, names in _OPERATORS.items() for name in names.split()}
KINDS |= {
    f"special_{name}{overload}": "wide floats"
    for name in _POLYNOMIALS.split()
    for overload in ("", ".n_scalar", ".x_scalar")
}


def is_of_kind(dtype: np.dtype, kind: Kind) -> bool:
    """Whether a dtype is one that an operator of this kind computes in."""
    if dtype == np.bool_:
        return kind in ("any", "real", "inexact, bool")
    if np.issubdtype(dtype, np.complexfloating):
        return kind in ("any", "numbers", "nowhere bool", "inexact", "inexact, bool", "wide inexact")
    if np.issubdtype(dtype, np.integer):
        taken = ("any", "numbers", "nowhere bool", "real", "real numbers", "integers")
        return kind in taken or kind.endswith(f", {dtype.name}")
    return kind != "integers" and (not kind.startswith("wide") or dtype.itemsize > 2)
