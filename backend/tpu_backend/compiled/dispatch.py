"""The backends that `torch.compile` finds: "tpu", and the default one, which goes by the device of a graph.

By default and with `backend="inductor"`, graphs of tpu tensors go to XLA and all others to inductor, as
before.

PyTorch keeps its backends in `torch._dynamo.backends.registry`. Importing that takes a second, which
`import torch` must not cost; so ours are entered when somebody imports it, as `torch.compile` does. The
default is a function of ours, because for the name "inductor" `torch.compile` imports all of inductor.

What differs from stock PyTorch where no tpu tensor is: a mode or an option that inductor does not know is
refused at the first call, not by `torch.compile`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

import torch

from tpu_backend.after_import import after_import

log = logging.getLogger("tpu_backend.compile")

_REGISTRY = "torch._dynamo.backends.registry"
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def install() -> None:
    """Have inductor go by the device of a graph. Enter both backends into PyTorch's registry, and let
    flex_attention take tpu tensors: now, or when they are imported.
    """
    _let_inductor_go_by_device()
    after_import(_REGISTRY, _enter)
    after_import(_FLEX_ATTENTION, _allow_tpu)


def tpu(module: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """What `torch.compile(..., backend="tpu")` calls; see `tpu_backend.compiled.backend`."""
    from tpu_backend.compiled.backend import backend

    return backend(module, inputs, **given)


def by_device(module: torch.fx.GraphModule, inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """Inductor with the mode or options given, which refuses, in PyTorch's words, what it does not know; its
    call takes our backend for a graph with a tpu tensor.
    """
    return torch._TorchCompileInductorWrapper(given.get("mode"), given.get("options"), None)(module, inputs)


by_device.__name__ = "inductor"  # under which Dynamo's logs and repro scripts know it


def _let_inductor_go_by_device() -> None:
    """Have `backend="inductor"` do as the default backend does: Accelerate, for one, always names it."""
    inductor = torch._TorchCompileInductorWrapper
    of_pytorch = inductor.__call__

    @wraps(of_pytorch)
    def call(self: Any, module: torch.fx.GraphModule, inputs: Sequence[Any], **patches: Any) -> Any:
        if not _is_on_tpu(module, inputs):
            return of_pytorch(self, module, inputs, **patches)
        if self.config:
            log.info("torch.compile: %s is for inductor; on tpu XLA decides by itself", self.config)
        return tpu(module, inputs)

    inductor.__call__ = call  # type: ignore[method-assign, assignment]


def _is_on_tpu(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    values = [*inputs, *module.parameters(), *module.buffers()]
    # A graph may have no inputs: torch.ones(3, device="tpu").
    values += [node.meta.get("example_value") for node in module.graph.nodes]
    return any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in values)


def _enter(registry: ModuleType) -> None:
    registry.register_backend(tpu)
    if registry.get_default_backend() == "inductor":
        registry.set_default_backend(by_device)


def _allow_tpu(flex_attention: ModuleType) -> None:
    """Have Dynamo let tensors of the device through, where PyTorch's front end names the devices it knows."""
    check = flex_attention._validate_device
    of_pytorch = FunctionType(check.__code__, check.__globals__, "of_pytorch")

    @torch.compiler.substitute_in_graph(check)
    def _validate_device(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if query.device.type != "tpu":
            of_pytorch(query, key, value)
