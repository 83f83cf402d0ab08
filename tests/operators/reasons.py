"""Why an entry differs from the CPU by more than rounding, by its name and variant, and its dtype where it
differs for this reason in that one alone; each is in known.json.
"""

from __future__ import annotations

_TIES = "equal elements: the CPU takes whichever the steps of its selection leave, by no rule of order"
_UNSTABLE = "equal elements: the CPU's sort leaves them in no order of their own, ours in the order they had"
_ACCUMULATED = "PyTorch's own code accumulates in another dtype on the CPU than on devices it does not know"
_ILL_CONDITIONED = "last digits that the gradient multiplies, by more than twice what it does to the CPU's"
_FORMS = (
    "PyTorch's default steps parameter by parameter on the CPU and by lists on a device, and the CPU rounds"
    " the factors of lists to 16 bit: its own two forms differ by as much"
)
_CHAOTIC = "its line search goes another way for another last digit: so do PyTorch's AVX2 and AVX-512 kernels"

REASONS: dict[str, str] = {
    "topk": _TIES,
    "mode": _TIES,
    "kthvalue": _TIES,
    "sort": _UNSTABLE,
    "msort": _UNSTABLE,
    "argsort": _UNSTABLE,
    "nn.functional.linear_cross_entropy chunked": _ACCUMULATED,
    "nn.functional.linear_cross_entropy chunked_none": _ACCUMULATED,
    "svd": _ILL_CONDITIONED,
    "linalg.svd": _ILL_CONDITIONED,
    "SGD float16": _FORMS,
    "RAdam float16": _FORMS,
    "LBFGS complex64": _CHAOTIC,
}
