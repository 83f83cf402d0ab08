"""Why an entry differs from the CPU, by its name and variant; "probably" where nobody has tested it."""

from __future__ import annotations

_CONTRACTED = "probably: XLA rounds a * b + c once where the CPU rounds twice, and the sample cancels"
_SIXTEEN_BITS = "probably: the CPU rounds in between to 16 bits, XLA keeps float32"
_TIES = "probably: which of equal elements comes first is open, and the gradient goes to that one"

REASONS: dict[str, str] = {
    "asin": _CONTRACTED,
    "_foreach_acos": _CONTRACTED,
    "erfinv": _CONTRACTED,
    "masked.log_softmax": _SIXTEEN_BITS,
    "msort": _TIES,
}
