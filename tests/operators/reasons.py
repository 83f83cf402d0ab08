"""Why an entry differs from the CPU, where that is understood and is to stay: by its name and variant."""

from __future__ import annotations

_SPARSE = "tpu tensors are strided: a sparse result or argument raises, naming the operator"
_CONTRACTED = (
    "XLA rounds a * b + c once where the CPU rounds twice, and the sample cancels (an argument beside 1)"
)
_SIXTEEN_BITS = "the CPU rounds a sum or logarithm in between to 16 bits, XLA keeps float32"
_TIES = "which of equal elements comes first is open in an unstable sort, and the gradient goes to that one"

REASONS: dict[str, str] = {
    "sparse.sampled_addmm": _SPARSE,
    "sparse.mm reduce": _SPARSE,
    "to_sparse": _SPARSE,
    "asin": _CONTRACTED,
    "acos": _CONTRACTED,
    "_foreach_acos": _CONTRACTED,
    "_foreach_asin": _CONTRACTED,
    "erfinv": _CONTRACTED,
    "masked.log_softmax": _SIXTEEN_BITS,
    "msort": _TIES,
}
