"""Calls of ordinary graphs, without AOTAutograd's runtime.

For each call that runtime writes mutated inputs, makes outputs that are views of others, wraps subclasses of
tensors, and enters contexts, in Python: a step of a small model took a fifth of its time there. A graph that
needs nothing of it is called by `csrc/aten/compiled_graph.cpp`. Its first call is still AOTAutograd's, which
compiles the backward graph only when a backward pass first reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._functorch._aot_autograd.schemas import OutputType, ViewAndMutationMeta
from torch._functorch._aot_autograd.utils import saved_tensors_hooks_are_inlineable, top_saved_tensors_hooks
from torch._guards import TracingContext
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpu_backend import _C

if TYPE_CHECKING:
    from tpu_backend.compiled.backend import Compiled

# What a graph returns (`csrc/aten/compiled_graph.h`): its place, and sizes, strides and offset of a view.
GraphValue = tuple[int, tuple[list[int], list[int], int] | None]

_MADE_ANEW = (OutputType.non_alias, OutputType.unsafe_view_alias)


class Halves:
    """The graphs that AOTAutograd makes of one of Dynamo's: forward and backward, or one for inference."""

    def __init__(self, module: fx.GraphModule, inputs: Sequence[Any]):
        (outputs,) = next(node for node in reversed(module.graph.nodes) if node.op == "output").args
        nodes = outputs if isinstance(outputs, list | tuple) else [outputs]
        made = (node.meta.get("example_value") if isinstance(node, fx.Node) else None for node in nodes)
        values = [*inputs, *made]
        self.num_inputs = len(inputs)
        self.are_tensors = all(
            isinstance(value, torch.Tensor) and not is_traceable_wrapper_subclass(value) for value in values
        )
        self.made: dict[str, Compiled] = {}
        self.metadata: ViewAndMutationMeta | None = None
        self.call: Callable[..., Any] | None = None
        """Calls them without AOTAutograd's runtime, once all are compiled, if they are ordinary."""

    def add(self, name: str, compiled: Compiled) -> None:
        """One of them is compiled."""
        self.made[name] = compiled
        if name != "backward":
            context = TracingContext.try_get()
            # AOTAutograd computes hooks that are graphs in its own, and switches them off in a call.
            if context is not None and not saved_tensors_hooks_are_inlineable(top_saved_tensors_hooks()):
                self.metadata = context.fw_metadata
        if name == "forward" or not self.are_tensors or self.metadata is None:
            return
        self.call = self._called(self.metadata, self.made.get("forward", compiled), self.made.get("backward"))

    def _called(
        self, metadata: ViewAndMutationMeta, forward: Compiled, backward: Compiled | None
    ) -> Callable[..., Any] | None:
        outputs, values = metadata.output_info, forward.values()
        is_ordinary = (
            metadata.num_forward_returns == len(outputs)  # nothing is written
            and not metadata.mutated_graph_handled_indices
            and metadata.grad_enabled_mutation is None
            and not metadata.num_tensors_saved_with_no_vc_check
            and all(each.output_type in _MADE_ANEW for each in outputs)
            and all(each.requires_grad == each.requires_grad_for_backward for each in outputs)
            and len(forward.graph.placeholders) == self.num_inputs
        )
        if not is_ordinary or values is None:
            return None
        if any(value is None or value[0] < 0 for value in values[: len(outputs)]):
            return None
        num_kept = len(values) - len(outputs)
        forward_operator = _C.GraphOperator(forward.name, values)
        if backward is None:
            return None if num_kept else _C.CompiledGraph(forward_operator, [False] * len(outputs), None)
        differentiable, gradients = [each.requires_grad for each in outputs], backward.values()
        if gradients is None or len(gradients) != self.num_inputs:
            return None
        if len(backward.graph.placeholders) != num_kept + sum(differentiable):
            return None
        # AOTAutograd brings the outputs' gradients into the strides that it has seen. Here a view would tell.
        if any(value is not None and value[1] is not None for value in gradients):
            return None
        return _C.CompiledGraph(forward_operator, differentiable, _C.GraphOperator(backward.name, gradients))
