"""Differences that are known, each with its reason. One is found by the call that the program ends in."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.operators.fuzz.check import Failure
from tests.operators.fuzz.program import Program


@dataclass(frozen=True)
class Known:
    reason: str
    kind: str
    call: str  # a pattern in the last line of the minimised program
    said: str = ""  # a pattern in what differs


_NO_KERNEL = "open: the CPU has no kernel for this dtype and says so, the device computes it"
_COMPUTED = (
    r"F\.(softplus|mish|logsigmoid|adaptive_avg_pool1d|avg_pool1d|gelu|softsign|tanhshrink|mse_loss|silu|elu|celu"
    r"|selu|hardswish|hardsigmoid|smooth_l1_loss|huber_loss|leaky_relu|hardtanh|relu6|hardshrink|softshrink)\("
    r"|torch\.(frac|nextafter|einsum|cdist|var|std|std_mean|logaddexp2|logaddexp|topk|median|nanmedian"
    r"|signbit|nn\.functional\.unfold|clamp|clip|lerp|atan2"
    r"|hypot|dist|dot|vdot|heaviside|frexp|kthvalue|trace|baddbmm|tensordot|mv|addcdiv|softmax|log_softmax"
    r"|logcumsumexp|cummax|cummin|renorm|polar)\("
    r"|\.(clamp_|clamp_min_|frac_|lerp_|addcdiv_|renorm_)\("
)
_NUMBERS = "open: a number that the dtype does not hold is refused by the CPU"
_OVERLAP = (
    "open: a write by index whose indices or values share memory with what is written, which the CPU refuses"
)
_EXPANDED = (
    "the CPU lets some writes through an expanded tensor pass, with a warning; the device refuses them all"
)

KNOWN = [
    Known(
        _NO_KERNEL, "does not raise", _COMPUTED, r"not implemented for|not support|only support|not supported"
    ),
    Known(_NUMBERS, "does not raise", "", "cannot be converted to type|without overflow|out of bounds"),
    Known(_NUMBERS, "does not raise", r"remainder|fmod|floor_divide|//|%", "ZeroDivisionError"),
    Known(
        _OVERLAP, "does not raise", r"index_|scatter|__setitem__|put_|gather|take", "written-to tensor refer"
    ),
    Known(_EXPANDED, "raises", "", "more than one element of the written-to tensor"),
    Known("open: integer powers beyond the low bits of the exponent", "values", r"pow"),
    Known("one number of another dtype is cast", "does not raise", "__setitem__|index_put_", "dtypes match"),
    Known(
        "open: out= of the dtype's own rule is not checked",
        "does not raise",
        r"amax.*out=",
        "dtype for input and out",
    ),
    Known(
        "out= of as many elements keeps its shape on the CPU, the device resizes it",
        "shape",
        r"(linspace|logspace|arange).*out=",
    ),
    Known("PyTorch's vectors have NaN where its formula has none", "values", r"logaddexp", "complex64"),
    Known(
        "BLAS multiplies each product by alpha: infinity meets its opposite",
        "values",
        r"addmm.*alpha=(-?inf|nan)",
    ),
    Known("Welford's mean of infinity is NaN on the CPU", "values", r"std_mean", "nan but got inf|inf"),
    Known("complex division by zero: any infinity", "values", r"true_divide|div|/", "complex64.*inf"),
]


def reason_for(program: Program, failure: Failure) -> str | None:
    last = program.lines[-1].text
    for known in KNOWN:
        if known.kind == failure.kind and re.search(known.call, last) and re.search(known.said, failure.text):
            return known.reason
    return None
