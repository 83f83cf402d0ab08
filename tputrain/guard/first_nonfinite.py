"""Which operation made the first value that is not a number, with its inputs and the line of the program.

Every operation is looked at as PyTorch dispatches it, forward and backward, on any device: slow, and meant
for one step.
"""

import math
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NOT_THE_USERS = (str(Path(torch.__file__).parent), __file__, "<frozen")


class FirstNonfinite(TorchDispatchMode):
    """Context that fills `found`: the first operation that made a NaN, and the first that made an infinity.

    Made, not passed on: an operation with a NaN among its inputs does not count for a NaN, nor one with an
    infinity or NaN among them (or among its numbers, as in a mask's fill of -inf) for an infinity.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = _floats_on_host((args, kwargs), copied=func._schema.is_mutable)  # gone afterwards
        output = func(*args, **kwargs)
        outputs = _floats_on_host(output)
        if outputs and not _is_uninitialized(func):
            self._look(str(func), inputs, outputs)
        return output

    def _look(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        kinds = [kind for kind in ("nan", "inf") if kind not in self.found and _hold(outputs, kind)]
        for kind in kinds:
            if _hold(inputs, "nan") or (kind == "inf" and _hold(inputs, "inf")):
                continue
            self.found[kind] = {
                "op": name,
                "made": kind,
                "line": _line(),
                "inputs": [describe(value) for value in inputs if isinstance(value, Tensor)],
                "outputs": [describe(value) for value in outputs if isinstance(value, Tensor)],
            }


@contextmanager
def looking_for_nonfinite() -> Iterator[FirstNonfinite]:
    """Context in which every operation is looked at; what backward does is traced to its forward line."""
    with torch.autograd.set_detect_anomaly(True, check_nan=False), FirstNonfinite() as mode:
        yield mode


def describe(tensor: Tensor) -> dict[str, Any]:
    """Shape, dtype, and of the finite values minimum, maximum and mean; how many are not finite."""
    values = tensor.detach().cpu().float()
    finite = values[torch.isfinite(values)]
    described: dict[str, Any] = {
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "nan": int(values.isnan().sum()),
        "inf": int(values.isinf().sum()),
    }
    if finite.numel():
        statistics = {"min": finite.min(), "max": finite.max(), "mean": finite.mean()}
        described |= {name: float(f"{value.item():.6g}") for name, value in statistics.items()}
    return described


def _floats_on_host(values: Any, copied: bool = False) -> list[Any]:
    """What can be infinite or NaN in an operation's arguments or results.

    Looked at on the host: on a device every look would be programs to compile.
    """
    leaves = [leaf for leaf in tree_leaves(values) if _can_be_nonfinite(leaf)]
    return [leaf.detach().to("cpu", copy=copied) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _can_be_nonfinite(leaf: Any) -> bool:
    return isinstance(leaf, float) or (isinstance(leaf, Tensor) and leaf.is_floating_point())


def _is_uninitialized(func: Any) -> bool:
    return func._schema.name in ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


def _hold(values: list[Any], kind: str) -> bool:
    """Whether some value is NaN (`nan`) or infinite (`inf`)."""
    for value in values:
        if isinstance(value, Tensor):
            found = value.isnan() if kind == "nan" else value.isinf()
            if bool(found.any()):
                return True
        elif math.isnan(value) if kind == "nan" else math.isinf(value):
            return True
    return False


def _line() -> str:
    """The user's line that is running; in backward, the line whose gradient is computed."""
    node: Any = torch._C._current_autograd_node()
    if node is not None:
        for entry in reversed(node.metadata.get("traceback_", [])):
            place = " ".join(entry.split())
            if not any(path in place for path in _NOT_THE_USERS):
                return f"backward of {place}"
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown"
