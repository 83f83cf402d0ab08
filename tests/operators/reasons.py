"""Why an entry differs from the CPU by more than rounding, by its name and variant; each is in known.json."""

from __future__ import annotations

_TIES = "equal elements: the CPU takes whichever the steps of its selection leave, by no rule of order"
_ILL_CONDITIONED = "last digits that the gradient multiplies, by more than twice what it does to the CPU's"

REASONS: dict[str, str] = {
    "topk": _TIES,
    "mode": _TIES,
    "kthvalue": _TIES,
    "svd": _ILL_CONDITIONED,
    "linalg.svd": _ILL_CONDITIONED,
    "linalg.householder_product": _ILL_CONDITIONED,
}
