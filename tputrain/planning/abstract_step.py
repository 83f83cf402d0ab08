"""A training step without values: recorded as one rank of a slice that is not here would run it.

The Trainer itself builds the model, lays it out and runs the step; the device only records. So a plan's
program is the run's.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import getfile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tputrain import device as devices
from tputrain.batches import Batch
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.loop.next_batches import NextBatches
from tputrain.loss import LossFunction
from tputrain.models.meta import is_on_meta
from tputrain.parallel.step_schedule import with_line
from tputrain.trainer import Trainer
from tputrain.user_code import is_users, line_of

LOSS = "loss"
AFTER_BACKWARD = "gradients"  # their norm, and clipping
OPTIMIZER = "optimizer"
ONCE = (AFTER_BACKWARD, OPTIMIZER)
"""Labels of what is done once a step, whatever its micro-batches."""


@dataclass(frozen=True)
class AbstractStep:
    """What a rank launches in a step, with all of its collectives."""

    segment: dict[str, Any]
    num_segments: int
    """In so many programs; `segment` is the largest of them."""
    seconds: float
    """That it took to record."""


def abstract_step(
    model: nn.Module, cfg: RunConfig, batch: Batch, loss_fn: LossFunction | None = None
) -> AbstractStep:
    """Record a step of the Trainer on `model` (parameters best on meta), whose micro-batches are `batch`.

    In a process that stands for a rank (`compiled_step.start_slice`). `batch` is that of all ranks, on the
    host; its values do not count, but labels of -100 do. Raises UserError where the model reads a value, and
    names the line.
    """
    began, title = time.perf_counter(), type(model).__name__  # FSDP makes another class of it
    values = _nothing if is_on_meta(model) else None
    trainer = Trainer(model, cfg, loss_fn=loss_fn, initialize=values)
    trainer.model.train()
    feed = feed_of(_Always(batch), trainer.device)
    batches = NextBatches(feed, trainer.device, cfg.trainer.accumulate, trainer.world).draw(0)
    slices = devices.of_slices()
    slices.recorded()  # what building the model left
    labels = _Labels(trainer.model, trainer.optimizer)
    with _reads_named(title), labels.made(), trainer.execution.in_form("fused"):
        trainer.train_step(*batches.counted)  # the first one makes what later ones find: FSDP's buffers
        slices.recorded()
        trainer.train_step(*batches.counted)
        segments = slices.recorded()
    largest = max(segments, key=lambda each: len(each["tape"]))
    return AbstractStep(largest, len(segments), time.perf_counter() - began)


class _Always:
    """A loader of the same batch."""

    def __init__(self, batch: Batch):
        self._batch = batch

    def batch_at(self, step: int, micro: int) -> Batch:
        return self._batch


def _nothing(model: nn.Module) -> None:
    """There are no values to give."""


@contextmanager
def _reads_named(title: str) -> Iterator[None]:
    """What reads a value in here is one line that names where."""
    try:
        yield
    except RuntimeError as error:
        if not devices.of_slices().is_read(error):
            raise
        line = line_of(error)
        at = "" if line is None else f" at {line}"
        raise UserError(
            f"{title}: cannot be compiled without running it: its step reads a value of the device{at}; "
            "expected a step without item(), print, data-dependent shapes and operations that the CPU does"
        ) from error


class _Labels(TorchFunctionMode):
    """Names what is recorded: the pass, the innermost module, and the line that called PyTorch.

    That is "forward model.layers.0.mlp, llama.py:212". In the backward pass a module begins where the nodes
    of its outputs run. A node's line there is the one that made it, in the forward pass.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        super().__init__()
        self._optimizer = optimizer
        self._names = {id(each): name for name, each in model.named_modules()}
        kinds = {kind for each in model.modules() for kind in type(each).__mro__}
        # Lines of tputrain are not the user's, but those of its models count.
        self._files = {getfile(kind) for kind in kinds if kind.__module__.startswith("tputrain.")}
        self._open: list[str] = []
        self._label = self._line = self._marked = ""
        self._outside = "", ""  # label and line of what had something computed again
        self._ends_backward = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # Dynamo would trace what follows into the user's graph
            return func(*args, **(kwargs or {}))
        line = self._line_of(sys._getframe(1))
        if line is not None:
            self._mark(self._label, line)
        first = torch._C._autograd._get_sequence_nr()
        result = func(*args, **(kwargs or {}))
        for node in _nodes(result):
            if node._sequence_nr() >= first:  # else another call made it
                node.register_prehook(partial(self._in_line, self._line))
        return result

    @contextmanager
    def made(self) -> Iterator[None]:
        """Labels are made in this context.

        The hooks are those of all modules: with a hook of its own a head would make all its logits, and the
        plan's program would not be the run's.
        """
        handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
            self._optimizer.register_step_pre_hook(lambda *_: self._mark(OPTIMIZER)),
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _line_of(self, frame: FrameType | None) -> str | None:
        """The innermost line of the user's or of a model's file, from a frame of the step outwards; empty:
        there is none. None: the backward pass calls.
        """
        while frame is not None and frame.f_code is not abstract_step.__code__:
            file = frame.f_code.co_filename
            if frame.f_code is _engine_run_backward.__code__:
                return None
            if is_users(file) or file in self._files:
                return f"{Path(file).name}:{frame.f_lineno}"
            frame = frame.f_back
        return ""

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if id(module) not in self._names:
            return
        # A pass inside the backward pass computes again what was not kept.
        is_again = torch._C._current_graph_task_id() >= 0
        label = f"{'again' if is_again else 'forward'} {self._names[id(module)]}".strip()
        if not self._open and is_again:
            self._outside = self._label, self._line
            self.__enter__()  # the mode is off inside `backward()`, as inside of all calls of PyTorch
        self._open.append(label)
        self._mark(label, self._line)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) not in self._names:
            return
        self._open.pop()
        name = f"backward {self._names[id(module)]}".strip()
        for node in _nodes(output):
            node.register_prehook(partial(self._in_module, name, self._line))
        if self._open:
            self._mark(self._open[-1], self._line)
        elif torch._C._current_graph_task_id() >= 0:
            self.__exit__(None, None, None)
            self._mark(*self._outside)
        else:
            self._mark(LOSS)

    def _in_line(self, line: str, *_: Any) -> None:
        self._mark(self._label, line)

    def _in_module(self, name: str, line: str, *_: Any) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._mark(name, line)

    def _after_backward(self) -> None:
        self._ends_backward = False
        self._mark(AFTER_BACKWARD)

    def _mark(self, label: str, line: str = "") -> None:
        self._label, self._line = label, line
        name = label if label in ONCE else with_line(label, line)
        if name != self._marked:
            self._marked = name
            devices.of_slices().mark(name)


def _nodes(output: Any) -> list[Any]:
    """Those of the backward pass that made the tensors of an output."""
    with torch._C.DisableTorchFunction():
        nodes = [each.grad_fn for each in tree_leaves(output) if isinstance(each, Tensor)]
    return [each for each in nodes if each is not None]
