"""A training step without values: recorded as one rank of a slice that is not here would run it.

The Trainer itself builds the model, lays it out and runs the step; the device only records. So a plan's
program is the run's.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from tputrain import device as devices
from tputrain.batches import Batch
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.loop.next_batches import NextBatches
from tputrain.loss import LossFunction
from tputrain.models.meta import is_on_meta
from tputrain.trainer import Trainer
from tputrain.user_code import line_of

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


class _Labels:
    """Gives what is recorded the name of the innermost module it belongs to, and of its pass.

    In the backward pass a module begins where the nodes of its outputs run.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._names = {id(each): name for name, each in model.named_modules()}
        self._open: list[str] = []
        self._marked = ""
        self._ends_backward = False

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
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if id(module) not in self._names:
            return
        # A pass inside the backward pass computes again what was not kept.
        is_again = torch._C._current_graph_task_id() >= 0
        label = f"{'again' if is_again else 'forward'} {self._names[id(module)]}".strip()
        self._open.append(label)
        self._mark(label)

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if id(module) not in self._names:
            return
        self._open.pop()
        name = f"backward {self._names[id(module)]}".strip()
        after_all = name if torch._C._current_graph_task_id() >= 0 else LOSS
        self._mark(self._open[-1] if self._open else after_all)
        for each in tree_leaves(output):
            if isinstance(each, Tensor) and each.grad_fn is not None:
                each.grad_fn.register_prehook(partial(self._in_backward, name))

    def _in_backward(self, name: str, *_: Any) -> None:
        if not self._ends_backward:
            self._ends_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._mark(name)

    def _after_backward(self) -> None:
        self._ends_backward = False
        self._mark(AFTER_BACKWARD)

    def _mark(self, label: str) -> None:
        if label != self._marked:
            self._marked = label
            devices.of_slices().mark(label)
