"""Imports timm where torchvision is missing, or does not load because it was built for another torch.

timm's models take one class of torchvision's, to ask whether a layer is a frozen batch norm; all else is for
its data sets and transforms, which nothing here uses. So while timm is imported, and no longer, empty modules
stand in for torchvision.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from types import ModuleType

from torch import nn

INSTALL = "pip install --no-deps timm pillow"

_MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.datasets",
    "torchvision.ops",
    "torchvision.ops.misc",
)


class TimmNotInstalledError(RuntimeError):
    """timm or what it imports is missing; says how to install it."""


class _InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _StandIn(ModuleType):
    """A module in which every name is a new class, which has no instances."""

    __path__: list[str] = []  # noqa: RUF012 - a package without files, as the import system wants it

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            return _InterpolationMode
        return type(name, (nn.Module,), {})


@cache
def import_timm() -> ModuleType:
    """timm, whatever torchvision is. Raises TimmNotInstalledError."""
    try:
        if _torchvision_loads():
            return importlib.import_module("timm")
        with _stand_in_for_torchvision():
            return importlib.import_module("timm")
    except ImportError as error:
        raise TimmNotInstalledError(f"timm cannot be imported: {error}; install it: {INSTALL}") from error


def _torchvision_loads() -> bool:
    try:
        importlib.import_module("torchvision.transforms")
    except (ImportError, OSError, RuntimeError):  # missing, or "operator torchvision::nms does not exist"
        return False
    return True


@contextmanager
def _stand_in_for_torchvision() -> Iterator[None]:
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "torchvision"}
    for name in before:
        del sys.modules[name]
    modules = {name: _StandIn(name) for name in _MODULES}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
        sys.modules.update(before)
