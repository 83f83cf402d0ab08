"""One optimizer step: forward and backward of its micro-batches, clipping, update. Dispatched, not read.

A step knows nothing of runs, callbacks or disks. The Trainer, the learning rate finder, the replay of a bad
step and the rehearsal of a plan all use this one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain.batches import Batch
from tputrain.guard.withheld_update import WithheldUpdate
from tputrain.loop.logged import expect_tensors, means
from tputrain.loop.step_parts import StepHooks, StepParts, StepResult
from tputrain.loss import expect_gradient, loss_of
from tputrain.models.sequence import sequence_split
from tputrain.optim.clipping import clip_gradients


class TrainStep:
    """The step of a Trainer. For another one, override one of these and give the class as `step=`:

    - `forward`: another loss. Evaluations call it too.
    - `gradients`: other forward and backward passes. The replay of a bad step runs this method alone, so it
      must change no parameter.
    - `optimizer_step`: which optimizers step.
    - `update`: all of it. `trainer.on_nonfinite=skip` and `rollback` need the one of this class.
    """

    may_be_probabilities = True
    """What `tputrain.loss.may_be_probabilities` said of the first step's targets, on the host."""

    def __init__(self, parts: StepParts):
        self.parts = parts
        self.model, self.optimizer, self.loss_fn = parts.model, parts.optimizer, parts.loss_fn
        self.device, self.world = parts.device, parts.world
        self.logged, self.hooks = parts.logged, StepHooks()
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.withhold: Callable[[], WithheldUpdate | None] = lambda: None
        """Asked before each update: what takes it back on the device where it is bad."""

    def __call__(self, batches: list[Batch], shares: list[float], is_captured: bool = True) -> StepResult:
        """Dispatch a step as one program; nothing is read. `batches` and `shares`: see `batches.counted`.

        `is_captured`: whether it may be a replay with `execution.train=captured`.
        """
        update = self.update
        if is_captured and self.parts.execution.captures:
            update = self._captured
        elif self.world.size > 1:
            update = self._region
        result = update(batches, shares)
        devices.flush(self.device)
        return result

    @cached_property
    def _captured(self) -> Callable[..., StepResult]:
        return devices.captured(self.update, self._modules, self.optimizer)

    @cached_property
    def _region(self) -> Callable[..., StepResult]:
        return devices.region(self.update, self._modules, self.optimizer)

    @property
    def _modules(self) -> list[nn.Module]:
        return [each for each in vars(self).values() if isinstance(each, nn.Module)]

    def update(self, batches: list[Batch], shares: list[float]) -> StepResult:
        """Gradients, then the optimizer's step; no gradient is left. With several ranks this is a region."""
        withheld = self.withhold()
        with self.logged.collected() as logged:
            loss, grad_norm = self.gradients(batches, shares)
            for hook in self.hooks.before_optimizer_step:
                hook()
            with nullcontext() if withheld is None else withheld.where_bad(loss, grad_norm):
                self.optimizer_step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.parts.execution.captures:
            expect_tensors(logged)
        return StepResult(loss, grad_norm, means(logged))

    def gradients(self, batches: list[Batch], shares: list[float]) -> tuple[Tensor, Tensor]:
        """Forward and backward; returns the mean loss over the labels of all micro-batches, and the norm of
        all gradients before clipping.
        """
        total: Tensor | None = None
        with sequence_split(self.world.sequence):
            for batch, share in zip(batches, shares, strict=True):
                loss = self.forward(batch)[0]
                if share != 1 or self.world.size > 1:  # ranks whose shares differ do the same operations
                    loss = loss * share
                self.backward(loss)
                total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        return self.world.mean(total), self.clip()

    def forward(self, batch: Batch) -> tuple[Tensor, Any, Any]:
        """The mean loss of a batch (a scalar), the model's output, and the target."""
        batch = batch_of.to_device(batch, self.device)
        with devices.autocast(self.device, self.parts.execution.autocast):
            inputs, named_inputs = batch_of.arguments(self.model, batch)
            output = self.parts.execution.model(*inputs, **named_inputs)
            target = batch_of.target_of(batch)
            loss = loss_of(output, target, self.loss_fn, self.may_be_probabilities)
            return loss, output, target

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`, with the hooks of callbacks around it."""
        expect_gradient(loss)
        for hook in self.hooks.before_backward:
            hook(loss)
        loss.backward()
        for after in self.hooks.after_backward:
            after()

    def clip(self) -> Tensor:
        """Clip the gradients as `trainer.max_grad_*` say; returns their norm before that."""
        limits = self.parts.limits
        return clip_gradients(self.parameters, limits.max_grad_norm, limits.max_grad_value)

    def optimizer_step(self) -> None:
        """Take the optimizer's step. One of several optimizers is `self.optimizer.parts[0]`."""
        self.optimizer.step()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """In here passes are no steps of the run: no hook is called, and what is logged is dropped."""
        hooks, self.hooks = self.hooks, StepHooks()
        try:
            with self.logged.collected():
                yield
        finally:
            self.hooks = hooks

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the step beside the optimizer's state, as JSON."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
