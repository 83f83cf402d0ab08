"""Why torch.compile makes a graph again, from what Dynamo says of its guards."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch._dynamo.utils import get_metrics_context

# The names that C++ gives to dtypes.
_DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
}
# Global settings, by how Dynamo's name begins: the kind of cause, and what the setting is.
_STATES = {
    "autocast(": ("autocast", "autocast"),
    "allow_tf32": ("precision", "torch.set_float32_matmul_precision"),
    "grad_mode": ("graph", "gradient mode"),
}


def why_again() -> tuple[str, str] | None:
    """The kind of cause (`runtime.causes.KINDS`) and what it is, for the graph that is made right now; None:
    its function was not compiled before.
    """
    reason = get_metrics_context()._metrics.get("recompile_reason")
    return None if reason is None else cause_of_guard(reason)


def cause_of_guard(reason: str) -> tuple[str, str]:
    """Of a failed guard in Dynamo's words: `0/1: ` and an expression, with a comment and lines of its own."""
    guard = (reason.partition(": ")[2] or reason).partition("\n")[0].partition("  #")[0].strip()
    if match := re.match(r"tensor '(.+)' (\w+) mismatch", guard):
        if (found := _of_tensor(_attribute(match[1]), match[2], guard)) is not None:
            return found
    elif match := re.match(r"GLOBAL_STATE changed: (.*)", guard):
        return _of_state(match[1].split())
    elif match := re.fullmatch(r"([\w.\[\]']+) == (.+)", guard):
        is_number = re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?|True|False", match[2])
        kind = "static number" if is_number else "argument"
        return kind, f"{_attribute(match[1])} is {match[2]} no more"
    return "graph", f"no longer true: {guard}"


def _of_state(names: Sequence[str]) -> tuple[str, str]:
    """Of PyTorch's global settings, those that changed."""
    said = []
    for name in names:
        kind, text = next(
            (found for start, found in _STATES.items() if name.startswith(start)), ("graph", name)
        )
        if (kind, text) not in said:
            said.append((kind, text))
    kinds = [kind for kind, _ in said if kind != "graph"]
    return kinds[0] if kinds else "graph", f"{' and '.join(text for _, text in said)} changed"


def _of_tensor(name: str, what: str, guard: str) -> tuple[str, str] | None:
    numbers = re.search(r"(?:at index (\d+))?\. expected (\w+), actual (\w+)", guard)
    if what == "requires_grad":
        is_new = guard.endswith("=0")
        verb = "requires a gradient, and did not" if is_new else "requires no gradient, and did"
        return "requires_grad", f"{name} {verb}"
    if numbers is None:
        return None
    place, before, now = numbers.groups()
    if what == "dtype":
        return "dtype", f"{name} is {_DTYPES.get(now, now)}, was {_DTYPES.get(before, before)}"
    if what == "rank":
        return "shape", f"{name} has {now} dims, had {before}"
    if what in ("size", "stride"):
        kind = "shape" if what == "size" else "strides"
        return kind, f"{what} {place} of {name} is {now}, was {before}"
    return None


def _attribute(source: str) -> str:
    """`self._modules['up']._parameters['weight']` as a user writes it."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]", r".\1", source)
