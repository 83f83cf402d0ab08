"""Why an entry differs from the CPU, where that is understood and is to stay: by its name and variant."""

from __future__ import annotations

_SPARSE = "tpu tensors are strided: a sparse result or argument raises, naming the operator"

REASONS: dict[str, str] = {
    "sparse.sampled_addmm": _SPARSE,
    "sparse.mm reduce": _SPARSE,
    "to_sparse": _SPARSE,
}
