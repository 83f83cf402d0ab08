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


_EXPANDED = (
    "the CPU lets some writes through an expanded tensor pass, with a warning; the device refuses them all"
)

KNOWN = [
    Known(_EXPANDED, "raises", "", "more than one element of the written-to tensor"),
    Known("one number of another dtype is cast", "does not raise", "__setitem__|index_put_", "dtypes match"),
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
