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
_OF_TENSOR = re.compile(r"tensor '(.+)' (\w+) mismatch")

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
    furthest = max(failed.values(), key=_progress, default=None)
    return None if furthest is None else MadeAgain(*cause_of_guard(furthest), earlier)


def _progress(reason: str) -> tuple[int, int, int]:
    """How far a graph's guards held before this one: global settings come first, then values, and of tensors
    arguments before parameters, whose names are longer; of a tensor its dtype, then its sizes.
    """
    guard = _expression(reason)
    if match := _OF_TENSOR.match(guard):
        checks = ("dtype", "requires_grad", "rank", "size", "stride")
        return 2, len(match[1]), checks.index(match[2]) if match[2] in checks else -1
    return (0 if guard.startswith("GLOBAL_STATE") else 1), 0, 0


def cause_of_guard(reason: str) -> tuple[str, str]:
    """Of a failed guard in Dynamo's words: `0/1: ` and an expression, with a comment and lines of its own."""
    guard = _expression(reason)
    if match := _OF_TENSOR.match(guard):
        if (found := _of_tensor(_attribute(match[1]), match[2], guard)) is not None:
            return found
    elif match := re.match(r"GLOBAL_STATE changed: (.*)", guard):
        return _of_state(match[1].split())
    elif match := re.fullmatch(r"([^()=]+) == (.+)", guard):
        is_number = re.fullmatch(r"-?[\d.]+(e[-+]?\d+)?", match[2])
        kind = "static number" if is_number else "argument"
        return kind, f"{_attribute(match[1])} is {match[2]} no more"
    return "shape" if ".size()[" in guard else "graph", f"Dynamo says: {guard}"


def _expression(reason: str) -> str:
    return (reason.partition(": ")[2] or reason).partition("\n")[0].partition("  #")[0].strip()


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
