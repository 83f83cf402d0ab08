"""Why torch.compile makes a graph again, from what Dynamo says of its guards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType
from weakref import WeakKeyDictionary

from torch._dynamo import symbolic_convert
from torch._dynamo.utils import get_metrics_context, guard_failures
from torch._guards import CompileContext

from tpu_backend.runtime.causes import MadeAgain

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
    "UInt16": "uint16",
    "UInt32": "uint32",
    "UInt64": "uint64",
    "ComplexHalf": "complex32",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e5m2": "float8_e5m2",
}
# Global settings, by how Dynamo's name begins: the kind of cause, and what the setting is.
_STATES = {
    "autocast(": ("autocast", "autocast"),
    "allow_tf32": ("precision", "torch.set_float32_matmul_precision"),
    "grad_mode": ("graph", "gradient mode"),
}
_TELLING = {
    kind: rank
    for rank, kind in enumerate(
        ("shape", "dtype", "strides", "requires_grad", "static number", "argument", "autocast", "precision")
    )
}


_graphs_of_code: dict[CodeType, list[str]] = {}  # operators by the function that Dynamo made them of
# By compilation: what its forward graph was made for is what its backward graph is, which may be made later.
_found: WeakKeyDictionary[CompileContext, MadeAgain | None] = WeakKeyDictionary()


def why_again(operator: str) -> MadeAgain | None:
    """Why Dynamo compiles the function of this graph again, right now; None: it is the first time."""
    compilation = CompileContext.try_get()
    translator = getattr(symbolic_convert.tls, "current_tx", None)
    if compilation is None:
        return None
    if translator is not None:
        earlier = _graphs_of_code.setdefault(translator.f_code, [])
        if compilation not in _found:
            _found[compilation] = _why_again(translator.f_code, frozenset(earlier))
        earlier.append(operator)
    return _found.get(compilation)


def _why_again(code: CodeType, earlier: frozenset[str]) -> MadeAgain | None:
    if get_metrics_context()._metrics.get("recompile_reason") is None:
        return None
    failed: dict[str, str] = {}  # by compile id: one guard of each graph that there is
    for reason in reversed(guard_failures[code]):
        compile_id = reason.partition(": ")[0]
        if compile_id in failed:
            break
        failed[compile_id] = reason
    # Global settings are looked at first, and tensors tell most: the graph whose guards went furthest.
    causes = [cause_of_guard(reason) for reason in failed.values()]
    best = min(causes, key=lambda cause: _TELLING.get(cause[0], len(_TELLING)), default=None)
    return None if best is None else MadeAgain(*best, earlier)


def cause_of_guard(reason: str) -> tuple[str, str]:
    """Of a failed guard in Dynamo's words: `0/1: ` and an expression, with a comment and lines of its own."""
    guard = (reason.partition(": ")[2] or reason).partition("\n")[0].partition("  #")[0].strip()
    if match := re.match(r"tensor '(.+)' (\w+) mismatch", guard):
        if (found := _of_tensor(_attribute(match[1]), match[2], guard)) is not None:
            return found
    elif match := re.match(r"GLOBAL_STATE changed: (.*)", guard):
        return _of_state(match[1].split())
    elif match := re.fullmatch(r"([^()=]+) == (.+)", guard):
        is_number = re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?|True|False", match[2])
        kind = "static number" if is_number else "argument"
        return kind, f"{_attribute(match[1])} is {match[2]} no more"
    return "graph", f"Dynamo says: {guard}"


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
    return re.sub(r"\._(?:modules|parameters|buffers)\['(\w+)'\]|^G\['(\w+)'\]", _name, source)


def _name(match: re.Match[str]) -> str:
    return match[2] or f".{match[1]}"
