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
        "PyTorch's vectors have NaN where its formula has none", "values", r"logaddexp|sigmoid", "complex64"
    ),
    Known("zero to the complex power 0 and infinite powers", "values", r"pow", "complex.*nan"),
    Known(
        "oneDNN's gelu of float32 is NaN at infinity, PyTorch's own (of one number alone) infinite",
        "values",
        r"F\.gelu",
        r"float32.*\binf.*where the CPU has.*nan",
    ),
    Known("PyTorch has few kernels for complex numbers of 16 bit", "does not raise", "", "ComplexHalf"),
    Known(
        "a number in a tensor of the device's is cast, as on other devices: its value is not looked at",
        "does not raise",
        r"__setitem__\(t\d+, (torch\.tensor|\(?-?[\d.]*[+-]?\d*j)",
        "without overflow",
    ),
    Known("which of several NaNs a pool takes", "values", "max_pool.*return_indices", "nan"),
    Known(
        "resampling and adaptive means are products with a matrix: infinity reaches its neighbours",
        "values",
        r"F\.(interpolate|adaptive_avg_pool1d)",
        "nan",
    ),
    Known(
        "floats beyond the integers are undefined in C++",
        "values",
        r"\.(long|int|short)\(",
        "922337203685477580[78]",
    ),
    Known("written while it is read, in an order of the CPU's", "values", r"masked_scatter_"),
    Known(
        "max_pool1d of integers, which other pools take", "does not raise", "max_pool1d", "max_pool1d_impl"
    ),
    Known(
        "BLAS multiplies each product by alpha: infinity meets its opposite",
        "values",
        r"addmm.*alpha=-?(inf|nan|\d{8}|\d\.\d+e\+)",
    ),
    Known(
        "a product of numbers that overflow: in which order infinities meet is the BLAS's",
        "values",
        r"(add|badd)b?mm\(",
        r"\binf.*where the CPU has.*nan",
    ),
    Known(
        "LU of infinite numbers: which pivot is taken decides where NaN comes from",
        "values",
        r"linalg\.det\(",
        "inf|nan",
    ),
    Known(
        "SLEEF's fmod is NaN where the quotient overflows; the device has the remainder",
        "values",
        r"%|remainder|fmod",
        r"; \[(?!.*nan.*where).*where the CPU has.*nan",
    ),
    Known(
        "PyTorch's vectors have NaN where a complex number is infinite and C's division has 0",
        "values",
        r"reciprocal|rsqrt",
        r"complex(64|128).*where the CPU has.*nan",
    ),
    Known(
        "the CPU's kernel, which refuses, does not see that out= is the input: both are copied to it",
        "another error",
        r"clamp.*out=",
        "can't be cast to the desired output type.*not supported for complex",
    ),
    Known(
        "what divides by the number False is refused before its dtypes are",
        "another error",
        "//|floor_divide|%|remainder|fmod",
        "for 'Bool'.*ZeroDivisionError",
    ),
    Known("MKL refuses to transform no rows at all", "does not raise", r"fft\(", "MKL FFT error"),
    Known(
        "the CPU rounds to 16 bit before it adds: opposite infinities meet",
        "values",
        r"\.?sum\(.*dtype=torch.b?float16",
        r"\binf.*where the CPU has.*nan",
    ),
    Known("XLA's exp2 is exp: its last digits at large powers", "values", r"exp2\(", r"e\+3[0-9]"),
    Known("Welford's mean of infinity is NaN on the CPU", "values", r"std_mean", "nan but got inf|inf"),
    Known("mode sorts NaN by <: where it stands decides", "values", r"torch\.mode", "nan"),
    Known("the CPU rounds the first product of two, the device none or both", "values", r"cross\(", "nan"),
    Known(
        "the CPU adds alpha times the other one: infinity times a complex 1 has a NaN",
        "values",
        r"torch\.(add|sub|rsub)\(|\.(add|sub)_\(|t\d+ [+-] | [+-] t\d+",
        "complex(32|64).*nan",
    ),
    Known("more than memory holds: seen when it is read", "another error", r"arange", "alloc_cpu"),
    Known("more than memory holds: seen when it is read", "raises", "", "when it is read: OutOfMemoryError"),
    Known("the length of a range with an infinite step", "another error", "", "step must be finite"),
    Known("complex division by zero: any infinity", "values", r"true_divide|div|/", "complex64.*inf"),
]


def reason_for(program: Program, failure: Failure) -> str | None:
    last = program.lines[-1].text
    for known in KNOWN:
        if known.kind == failure.kind and re.search(known.call, last) and re.search(known.said, failure.text):
            return known.reason
    return None
