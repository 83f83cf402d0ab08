"""`torch.compile(model, backend="tpu")`.

Dynamo gives a graph, AOTAutograd makes a forward and a backward of it in functional ATen, and each of the two
becomes one operator (`tpu_backend.compiled.operation`), which the op stream records like any other. So
forward, backward and optimizer step still join one segment and are compiled by XLA together; what this path
saves is the host's time: one entry is recorded where eager mode records hundreds.

A graph with something that has no XLA form runs operation by operation, as in eager mode, and says so.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

import tpu_backend
from tpu_backend.compiled.graph import Graph, UnsupportedGraphError, concrete
from tpu_backend.compiled.operation import make_operator
from tpu_backend.lowering.names import functional_name

log = logging.getLogger("tpu_backend.compile")

Boxed = Callable[[list[Any]], Sequence[Any]]


def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """What Dynamo calls for `backend="tpu"`. Raises TypeError for a mode or options: there are none."""
    if any(given.values()):
        raise TypeError(f'torch.compile(backend="tpu") takes no mode and no options, got {given}')
    tpu_backend.register()
    from tpu_backend import _C

    _C.ensure_initialized()
    compiled = aot_autograd(
        fw_compiler=_compiler("forward"),
        bw_compiler=_compiler("backward"),
        inference_compiler=_compiler("inference"),
        decompositions=_decompositions(),
        partition_fn=_partition,
    )
    return compiled(module, example_inputs)


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's, but for what the lowering table has a better form of."""
    return {
        op: decomposition
        for op, decomposition in core_aten_decompositions().items()
        if not isinstance(op, torch._ops.OpOverload) or functional_name(op._schema) is None
    }


def _partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """PyTorch's own choice of what is kept for backward, but that what is drawn is never drawn again: under
    activation checkpointing its masks are kept.
    """
    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            outputs = [user for user in node.users if user.target is operator.getitem]
            for kept in outputs or [node]:
                kept.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if outputs:
                node.meta.pop("recompute", None)
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _compiler(name: str) -> Callable[[fx.GraphModule, Sequence[Any]], Boxed]:
    def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        values = (node.meta.get("val") for node in module.graph.nodes)
        if not any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in values):
            return _OperationByOperation(module)  # nothing of ours
        try:
            return _Compiled(name, module)
        except UnsupportedGraphError as reason:
            log.warning("torch.compile: the %s graph runs operation by operation: %s", name, reason)
            return _OperationByOperation(module)

    return compile_graph


class _OperationByOperation:
    """A graph as it is."""

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        given = tuple(inputs)
        inputs.clear()
        return self.module(*given)


class _Compiled:
    """A graph as a function from its inputs to its outputs."""

    def __init__(self, name: str, module: fx.GraphModule):
        self._boxed_call = True  # AOTAutograd: inputs come as one list
        self.graph = Graph(module)
        placeholders = self.graph.placeholders
        self.tensors = [
            place for place, node in enumerate(placeholders) if isinstance(node.meta["val"], torch.Tensor)
        ]
        self.sizes = [
            place for place, node in enumerate(placeholders) if not isinstance(node.meta["val"], torch.Tensor)
        ]
        wanted: dict[fx.Node, int] = {}
        (outputs,) = next(node for node in reversed(self.graph.nodes) if node.op == "output").args
        self.outputs = [self._output(node, wanted) for node in outputs]
        self.operator = None
        if wanted:
            self.graph.check(list(wanted))
            self.operator = make_operator(name, self.graph, list(wanted))

    def __call__(self, inputs: list[Any]) -> list[Any]:
        given = tuple(inputs)
        inputs.clear()  # the caller's references go, so that what nobody needs is freed
        results: Sequence[torch.Tensor] = ()
        if self.operator is not None:
            tensors = [given[place] for place in self.tensors]
            if not tensors:  # something must tell the dispatcher the device
                tensors = [torch.empty(0, device="tpu")]
            results = self.operator(tensors, [given[place] for place in self.sizes])
        return [output(given, results) for output in self.outputs]

    def _output(self, node: Any, wanted: dict[fx.Node, int]) -> Callable[[Any, Any], Any]:
        """What makes one output: (inputs, results of the operator) -> value."""
        if not isinstance(node, fx.Node):
            return lambda inputs, results: node
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return lambda inputs, results: concrete(value, self.graph.bind(inputs))
        if node.op == "placeholder":
            place = self.graph.placeholders.index(node)
            return lambda inputs, results: inputs[place]
        if (view := self._view_of_input(node)) is not None:
            return lambda inputs, results: view(inputs)
        place = wanted.setdefault(node, len(wanted))
        return lambda inputs, results: results[place]

    def _view_of_input(self, node: fx.Node) -> Callable[[Sequence[Any]], torch.Tensor] | None:
        """A view of an input costs nothing where it is made, and would be a copy as a result."""
        if node.op == "placeholder":
            place = self.graph.placeholders.index(node)
            return lambda inputs: inputs[place]
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target.is_view or node.kwargs:
            return None
        base, *rest = node.args
        if not isinstance(base, fx.Node) or any(isinstance(leaf, fx.Node) for leaf in jax.tree.leaves(rest)):
            return None
        viewed = self._view_of_input(base)
        return None if viewed is None else lambda inputs: target(viewed(inputs), *rest)
