"""Something to do once a module is imported, without importing it: parts of PyTorch take a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call `action` with the module of this name: now, or right after somebody imports it."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


class _AfterImport(MetaPathFinder):
    """Finds one module as everybody does, and acts once that was executed."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenAct(spec.loader, self)
        return spec


class _ThenAct(Loader):
    def __init__(self, loader: Loader, finder: _AfterImport):
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # type: ignore[union-attr]
        self._loader.exec_module(module)
        sys.meta_path.remove(self._finder)
        self._finder.action(module)
