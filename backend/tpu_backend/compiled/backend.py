"""`torch.compile(model, backend="tpu")`.

Dynamo gives a graph, AOTAutograd makes a forward and a backward of it in functional ATen, and each of the two
becomes one operator (`tpu_backend.compiled.operation`), which the op stream records like any other. So
forward, backward and optimizer step still join one segment and are compiled by XLA together; what this path
saves is the host's time: one entry is recorded where eager mode records hundreds.

A graph is split around what has no XLA form, which runs as in eager mode (`tpu_backend.compiled.split`).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

import tpu_backend
from tpu_backend import _C
from tpu_backend.compiled.constants import lift_constants
from tpu_backend.compiled.graph import SCATTERS, Graph, concrete
from tpu_backend.compiled.operation import make_operator, places_of
from tpu_backend.compiled.ordinary import GraphValue, Halves
from tpu_backend.compiled.sizes import Sizes
from tpu_backend.compiled.split import Boxed, OperationByOperation, Split
from tpu_backend.compiling import compiling
from tpu_backend.lowering.names import functional_name

log = logging.getLogger("tpu_backend.compile")


def backend(module: fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
    """What Dynamo calls for `backend="tpu"`. Raises TypeError for a mode or options: there are none."""
    if any(given.values()):
        raise TypeError(f'torch.compile(backend="tpu") takes no mode and no options, got {given}')
    tpu_backend.register()
    _C.ensure_initialized()
    halves = Halves(module, example_inputs)
    compiled = aot_autograd(
        fw_compiler=_compiler("forward", halves),
        bw_compiler=_compiler("backward", halves),
        inference_compiler=_compiler("inference", halves),
        decompositions=_decompositions(),
        partition_fn=_partition,
    )
    with compiling(len(module.graph.nodes), what="a graph of torch.compile"):
        through_aot = compiled(module, example_inputs)

    def call(*inputs: Any) -> Any:
        return through_aot(*inputs) if halves.call is None else halves.call(*inputs)

    return call


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's, but for what the lowering table or the graph has a better form of: select_scatter's has
    another dtype.
    """
    return {
        op: decomposition
        for op, decomposition in core_aten_decompositions().items()
        if not isinstance(op, torch._ops.OpOverload)
        or (functional_name(op._schema) is None and op not in SCATTERS)
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


def _compiler(name: str, halves: Halves) -> Callable[[fx.GraphModule, Sequence[Any]], Boxed]:
    def compile_graph(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        values = (node.meta.get("val") for node in module.graph.nodes)
        if not any(isinstance(value, torch.Tensor) and value.device.type == "tpu" for value in values):
            return OperationByOperation(module)  # nothing of ours
        constants = lift_constants(module)
        graph = Graph(module)
        graph.check()
        run: Boxed
        if graph.problems:
            run = Split(module, graph.problems, lambda part: Compiled(name, Graph(part)))
            log.info("torch.compile: the %s graph %s", name, run.described())
        else:
            run = Compiled(name, graph)
            if not constants:
                halves.add(name, run)
        return _with_constants(run, constants) if constants else run

    return compile_graph


def _with_constants(run: Boxed, constants: Sequence[torch.Tensor]) -> Boxed:
    def call(inputs: list[Any]) -> Sequence[Any]:
        given = [*inputs, *constants]
        inputs.clear()
        return run(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class Compiled:
    """A graph as a function from its inputs to its outputs."""

    def __init__(self, name: str, graph: Graph):
        self._boxed_call = True  # AOTAutograd: inputs come as one list
        self.graph = graph
        placeholders = self.graph.placeholders
        self.tensors, self.numbers = places_of(graph)
        # Compiled autograd gives its graphs sizes as empty tensors on the CPU, of which nothing else is used.
        self.elsewhere = [
            number
            for number, place in enumerate(self.tensors)
            if placeholders[place].meta["val"].device.type != "tpu"
        ]
        self.wanted: dict[fx.Node, int] = {}
        self.outputs = [self._output(node, self.wanted) for node in graph.outputs]
        self.operator = None
        if self.wanted:
            self.operator = make_operator(name, self.graph, list(self.wanted))
        self.sizes = Sizes(name, graph, "" if self.operator is None else self.name)

    @property
    def name(self) -> str:
        """Of its operator."""
        assert self.operator is not None
        return self.operator.name()  # type: ignore[attr-defined]

    def values(self) -> list[GraphValue | None] | None:
        """What it returns, for `_C.GraphOperator`; None if not all inputs and outputs are our tensors."""
        is_plain = self.operator is not None and not self.elsewhere and not self.sizes.are_dynamic
        if not is_plain or not 0 < len(self.tensors) == len(self.graph.placeholders):
            return None
        values: list[GraphValue | None] = []
        for node in self.graph.outputs:
            if node is not None and not isinstance(getattr(node, "meta", {}).get("val"), torch.Tensor):
                return None
            values.append(None if node is None else self._value(node))
        return values

    def _value(self, node: fx.Node) -> GraphValue:
        if node in self.wanted:
            return self.wanted[node], None
        base: Any = node
        while base.op != "placeholder":
            base = base.args[0]
        place = -1 - self.graph.placeholders.index(base)
        if base is node:
            return place, None
        shown, whole = node.meta["val"], base.meta["val"]
        offset = shown.storage_offset() - whole.storage_offset()
        return place, (list(shown.shape), list(shown.stride()), offset)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        given = tuple(inputs)
        inputs.clear()  # the caller's references go, so that what nobody needs is freed
        results: Sequence[torch.Tensor] = ()
        if self.operator is not None:
            self.sizes.note(given)
            results = self._run(given)
        return [output(given, results) for output in self.outputs]

    def _run(self, given: Sequence[Any]) -> Sequence[torch.Tensor]:
        tensors = [given[place] for place in self.tensors]
        for place in self.elsewhere:
            tensors[place] = torch.empty_like(tensors[place], device="tpu")
        if not tensors:  # something must tell the dispatcher the device
            tensors = [torch.empty(0, device="tpu")]
        assert self.operator is not None
        return self.operator(tensors, [given[place] for place in self.numbers])

    def _output(self, node: Any, wanted: dict[fx.Node, int]) -> Callable[[Any, Any], Any]:
        """What makes one output: (inputs, results of the operator) -> value."""
        if not isinstance(node, fx.Node):
            return lambda inputs, results: node
        if node.op == "placeholder":
            place = self.graph.placeholders.index(node)
            return lambda inputs, results: inputs[place]
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return lambda inputs, results: concrete(value, self.graph.bind(inputs))
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
        if not isinstance(base, fx.Node) or node.all_input_nodes != [base]:  # a size that is an input
            return None
        shown, whole = node.meta["val"], base.meta["val"]
        if (shown.dtype, shown.is_conj(), shown.is_neg()) != (whole.dtype, whole.is_conj(), whole.is_neg()):
            return None
        viewed = self._view_of_input(base)
        return None if viewed is None else lambda inputs: target(viewed(inputs), *rest)
