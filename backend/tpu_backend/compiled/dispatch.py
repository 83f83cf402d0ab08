"""The backends that `torch.compile` finds: "tpu", and the default one, which goes by the device of a graph.

By default graphs of tpu tensors go to XLA and all others to inductor, as before.

PyTorch keeps its backends in `torch._dynamo.backends.registry`. Importing that takes a second, which
`import torch` must not cost; so ours are entered when somebody imports it, as `torch.compile` does.

What differs from stock PyTorch where no tpu tensor is: a mode or an option that inductor does not know is
refused at the first call, not by `torch.compile`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import torch

log = logging.getLogger("tpu_backend.compile")

_REGISTRY = "torch._dynamo.backends.registry"
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def install() -> None:
    """Enter both into PyTorch's registry, and let flex_attention take tpu tensors: now, or when they are
    imported.
    """
    _after_import(_REGISTRY, _enter)
    _after_import(_FLEX_ATTENTION, _allow_tpu)


def tpu(module: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """What `torch.compile(..., backend="tpu")` calls; see `tpu_backend.compiled.backend`."""
    from tpu_backend.compiled.backend import backend

    return backend(module, inputs, **given)


def by_device(module: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Our backend for a graph with a tpu tensor, else inductor with the mode or options given."""
    if not _is_on_tpu(module, inputs):
        inductor = torch._TorchCompileInductorWrapper(given.get("mode"), given.get("options"), None)
        return inductor(module, inputs)
    if given:
        log.info("torch.compile: %s is for inductor; on tpu XLA decides by itself", given)
    return tpu(module, inputs)


by_device.__name__ = "inductor"  # under which Dynamo's logs and repro scripts know it


def _is_on_tpu(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    values = [*inputs, *module.parameters(), *module.buffers()]
    # A graph may have no inputs: torch.ones(3, device="tpu").
    values += [node.meta.get("example_value") for node in module.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in values)


def _enter(registry: ModuleType) -> None:
    registry.register_backend(tpu)
    if registry.get_default_backend() == "inductor":
        registry.set_default_backend(by_device)


def _allow_tpu(module: ModuleType) -> None:
    from tpu_backend.compiled.flex_attention import allow_tpu

    allow_tpu(module)


def _after_import(name: str, action: Callable[[ModuleType], None]) -> None:
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
