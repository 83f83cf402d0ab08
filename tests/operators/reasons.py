"""Why an entry differs from the CPU by more than rounding, by its name and variant."""

from __future__ import annotations

_TIES = "equal elements: which comes first is open, and with 16 bits there are many"
_STATISTICS = "statistics of 16-bit inputs are kept in float32, as on CUDA; the CPU has them in 16 bits"
_COMPLEX32 = "JAX has no complex numbers of 32 bits: they raise"
_ILL_CONDITIONED = "rounding that the gradient multiplies, by more than twice what it does to the CPU's"

REASONS: dict[str, str] = {
    "sort": _TIES,
    "argsort": _TIES,
    "msort": _TIES,
    "topk": _TIES,
    "mode": _TIES,
    "kthvalue": _TIES,
    "native_layer_norm": _STATISTICS,
    "native_batch_norm": _STATISTICS,
    "_native_batch_norm_legit": _STATISTICS,
    "_batch_norm_with_update": _STATISTICS,
    "chalf": _COMPLEX32,
    "complex": _COMPLEX32,
    "view_as_complex": _COMPLEX32,
    "svd": _ILL_CONDITIONED,
    "linalg.svd": _ILL_CONDITIONED,
    "linalg.householder_product": _ILL_CONDITIONED,
    "nn.functional.scaled_dot_product_attention": (
        "gradients without a mask: their dims lie in the order of the CPU's fused kernel"
    ),
    "nn.functional.soft_margin_loss": "float16 overflows on the CPU where float32 is kept here",
    "matrix_exp": "PyTorch's CPU makes NaN of 16-bit matrices; in float32 both round, by turns the more",
}
