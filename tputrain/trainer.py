"""The Trainer: a model, its data and a configuration, and the loop that brings them together."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.announce import announced, say
from tputrain.batches import Batch
from tputrain.callbacks.callback import Callback, Control, load_state_of, state_of
from tputrain.callbacks.config import build_callbacks
from tputrain.callbacks.events import EventLog
from tputrain.callbacks.recompile_budget import RecompileBudget
from tputrain.checkpoint import contents
from tputrain.checkpoint.background import BackgroundWriter, Written
from tputrain.checkpoint.configuration import padding_of
from tputrain.checkpoint.snapshot import Snapshot, take_snapshot
from tputrain.checkpoint.state import understood
from tputrain.checkpoint.store import CheckpointStore, damage, say_refused
from tputrain.config import RunConfig
from tputrain.config_checks import spelled
from tputrain.config_differences import changed_settings
from tputrain.errors import RunFailedError, UserError
from tputrain.evaluator import Evaluator
from tputrain.execution import Execution
from tputrain.feed import feed_of
from tputrain.garbage import ScheduledCollection
from tputrain.label_weights import LabelWeights
from tputrain.loggers.config import build_loggers
from tputrain.loggers.logger import Logger, Record
from tputrain.loss import LossFunction, loss_of
from tputrain.metrics.evaluation import evaluation_sets
from tputrain.metrics.flops import FlopCount
from tputrain.metrics.named import Metric, metric_functions
from tputrain.metrics.peak_flops import peak_flops
from tputrain.metrics.step_log import StepLog
from tputrain.models.meta import allocate, move
from tputrain.models.sequence import sequence_split
from tputrain.next_batches import NextBatches, StepBatches
from tputrain.nonfinite import BadSteps
from tputrain.optim.clipping import clip_gradients
from tputrain.optim.evaluation_weights import EvaluationWeights
from tputrain.optim.groups import freeze
from tputrain.optim.master_weights import values_kept_exact
from tputrain.optim.optimizer import build_optimizer, create_state, other_rates, set_learning_rate
from tputrain.optim.ownership import check_ownership
from tputrain.optim.schedule import LearningRate, jump
from tputrain.optim.schedule_free import progress_options
from tputrain.parallel.agreement import AgreedControl, AgreedSignals, Agreement
from tputrain.parallel.auto import divided
from tputrain.parallel.limits import check_limits
from tputrain.parallel.same_batches import check_loader
from tputrain.parallel.world import World, join
from tputrain.parallel.writer import SharedWriter
from tputrain.run_lock import RunLock, is_locked
from tputrain.signals import SignalWatch
from tputrain.trainer_arguments import check_arguments
from tputrain.versions import versions
from tputrain.watchdog import DATA, FIRST_STEP, READING, SAVING, STEP, Watchdog
from tputrain.worker_death import deaths_named
from tputrain.worker_signals import left_to


class Trainer:
    """Trains `model` as `cfg` says; `fit()` goes on from the newest checkpoint in `cfg.run_dir`, if any.

    What a batch may be: `tputrain.batches`. Where the loss comes from: `tputrain.loss`. `train_loader` is any
    iterable of batches, or an object with `batch_at(step, micro)`, which needs no skipping on resume;
    `val_loader` any iterable that can be gone through again and again; its `bytes_of(batch)`, the bytes of
    text that the batch's labels stand for, gives bits per byte if it has that method. It may also be a
    mapping of names to such loaders: results are `name/loss` and so on, and the first one's loss is `loss`.

    An `optimizer` given here (built on the parameters of `model`) keeps its own learning rate unless there is
    an `lr_scheduler` too; else both come from `cfg.optim` and `cfg.schedule`. `metrics` maps names to
    functions of (output, target), averaged over evaluations, beside those that `cfg.trainer.metrics` names.
    `tokenizer.save(directory)`, or `save_pretrained`, is called for every checkpoint.

    The parameters of `model` may be on the meta device (`tputrain.models.parameters_on_meta`). Then each rank
    holds no more than its part of them: `initialize(model)` gives them values in place, after they were
    divided, and only if no checkpoint does.

    Raises UserError, one line, for what the caller can mend.
    """

    # What is trained, and how.
    model: nn.Module
    cfg: RunConfig
    device: torch.device
    world: World
    optimizer: torch.optim.Optimizer

    # Where the run is; a checkpoint holds all of it.
    step: int
    """Optimizer steps done."""
    num_done: int
    """Tokens (of text) or samples trained on."""
    best: Record | None
    """The evaluation with the lowest loss that is finite."""
    evaluated_at: int | None
    """The step of the last evaluation that was not broken off."""

    # What goes along.
    control: Control
    callbacks: list[Callback]
    loggers: list[Logger]

    def __init__(
        self,
        model: nn.Module,
        cfg: RunConfig,
        *,
        train_loader: Any = None,
        val_loader: Iterable[Batch] | Mapping[str, Iterable[Batch]] | None = None,
        loss_fn: LossFunction | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        lr_scheduler: LearningRate | None = None,
        metrics: Mapping[str, Metric] | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger] = (),
        tokenizer: Any = None,
        initialize: Callable[[nn.Module], None] | None = None,
    ):
        check_arguments(model, cfg, loss_fn, optimizer, lr_scheduler, metrics, callbacks, loggers, initialize)
        self.cfg = cfg
        self.device = devices.find_device(cfg.device)
        self.world = join(cfg.parallel, self.device)
        if cfg.parallel.auto:
            self.world = divided(self.world, model, cfg, train_loader, loss_fn)
        check_limits(self.world, cfg, model, loss_fn)
        is_alone = self.world.size == 1
        self.model = model
        move(model, self.device)
        self.execution = Execution(
            self.model, self.device, cfg.execution, lambda: self.step, cfg.trainer.steps
        )
        freeze(self.model, cfg.optim.freeze)
        self._peak_flops = cfg.log.peak_flops or peak_flops(devices.chip_name(self.device))
        self._flops = None if self._peak_flops is None else FlopCount(self.model, loss_fn, not is_alone)
        self.world.parallelise(self.model, self.execution.compile_block, optimizer)
        allocate(self.model, self.device)
        self._initialize = initialize  # until the model has values
        self.loss_fn = loss_fn
        self.metrics = metric_functions(cfg.trainer.metrics) | dict(metrics or {})
        for name, loader in evaluation_sets(val_loader).items():
            check_loader(loader, f"val_loader{name and f' {name}'}", self.world, equal=False)
        self.val_loader = val_loader
        self.tokenizer = tokenizer
        budget = RecompileBudget(cfg.trainer.recompile_budget)
        self.callbacks = [*callbacks, *build_callbacks(cfg.callbacks), budget]
        self.control = Control() if is_alone else AgreedControl()

        self._scheduled_by_config = optimizer is None and lr_scheduler is None
        self._optimizer_is_given = optimizer is not None
        self.lr_scheduler = lr_scheduler
        self.optimizer = (
            optimizer
            if optimizer is not None
            else build_optimizer(model, cfg.optim, counts_on_device=self.execution.captures_training)
        )
        check_ownership(self.model, self.optimizer, lr_scheduler)
        self.parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        create_state(self.optimizer)
        self.evaluation_weights = EvaluationWeights(model, self.optimizer, cfg.optim.ema_decay, self.device)

        self._data: NextBatches | None = None
        if train_loader is not None:
            check_loader(train_loader, "train_loader", self.world, equal=True)
            feed = feed_of(train_loader, self.device)
            self._data = NextBatches(feed, self.device, cfg.trainer.accumulate, self.world)
        self.run_dir = None if cfg.run_dir is None else Path(cfg.run_dir)
        self._written_dir = self.run_dir if self.world.is_first else None  # where this rank writes its news
        self.store: CheckpointStore | None = None
        if self.run_dir is not None:
            self.store = CheckpointStore.of_run(self.run_dir, cfg.checkpoint)
            self.store.also_keeps = lambda steps: set().union(*(each.keeps(steps) for each in self.callbacks))
        if self._written_dir is not None:
            self.callbacks.append(EventLog(self._written_dir))
        self.loggers = []
        if self.world.is_first:
            self.loggers = [*build_loggers(cfg.log, self.run_dir, asdict(cfg)), *loggers]

        self.step = self.num_done = 0
        self.best = self.evaluated_at = None
        self.unit = "samples"
        self._resumed = False
        self._owns_run = False  # true in `fit`, and while something outside it writes there
        self._is_of_run = False  # what this Trainer holds comes from the run directory, or began it
        self._is_warm = False
        self._saved_at: int | None = None
        self._beginning: Snapshot | None = None  # until there is a checkpoint
        self._step_log = self._new_step_log()
        saves = self.store is not None
        self._signals = SignalWatch(saves) if is_alone else AgreedSignals(saves)
        self._bad_steps = BadSteps(self)
        self._writer = BackgroundWriter() if is_alone else SharedWriter(self.world)
        self._agreement = Agreement(
            self.world, self.control, self._signals, self._writer, lambda: self._step_log.host_seconds
        )
        rank = None if is_alone else self.world.rank
        self._watchdog = Watchdog(cfg.watchdog, self.run_dir, self.device, lambda: self.step, rank)
        self.label_weights = LabelWeights(self)
        self._evaluator = Evaluator(self, self._signals, self._agreement, self._watchdog)

    # -- the loop --------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train up to step `cfg.trainer.steps`, with evaluations and checkpoints on the way.

        On SIGINT or SIGTERM the step is ended, a checkpoint written and Interrupted (a SystemExit) raised.
        """
        self.control.stop = False  # of an earlier fit
        # Outermost the deaths of workers, which PyTorch raises in whatever line it comes by.
        with (
            deaths_named(),
            self._owning_run(),
            self._signals,
            self._signals.raised_at_the_end(),
            left_to(self._signals),
            self._watchdog,
            self._running() as garbage,
        ):
            self._start()
            self._evaluate_if_due()
            self._save_if_due()
            while not self._should_end() and self._advance():
                self._tell("on_step_end")
                self._agree()
                self._log_if_due()
                self._evaluate_if_due()
                self._save_if_due()
                garbage.after_step(self.step)
            self._end()

    def _advance(self) -> bool:
        """One step; False where a signal came while it waited for its data."""
        assert self._data is not None
        step = self.step
        self._is_warm &= not self.execution.before_step()
        self._expect_compilation(not self._is_warm)  # once more: an evaluation may have come since the start
        if (batches := self._wait_for_data(self._data.draw)) is None:
            return False
        batches = self._weighed(batches)
        if self._is_warm and self.execution.compiles and self.execution.is_new("train", batches.form):
            self._expect_compilation(True)
        if self.step != step:  # what was read meanwhile took the run back
            return self._advance()
        if self.is_interrupted:
            return False
        self._bad_steps.replay_if_due(batches.host)
        self._step_log.begin()
        if self._is_warm:
            with self._watchdog.phase(STEP):
                self._train_step(batches)
            self._signals.rescue_by(None)
        else:
            self._first_step(batches)
        self.execution.has_run("train", batches.form)
        if self.step <= step:  # it was bad, and the run is back before it
            return self._advance()
        self.execution.after_step()
        # Before values are read, so that the device has them by then.
        if not (self._should_end() or self._evaluation_is_due() or self._save_is_due()):
            self._wait_for_data(self._data.draw_ahead)
        return True

    def _first_step(self, batches: StepBatches) -> None:
        """The first of a process, or of a form: it gets its program, so it is announced and waited for."""
        program = " is recorded, and its program compiled or found" if self.device.type == "tpu" else ""
        with self._watchdog.phase(FIRST_STEP):
            with announced(f"step {self.step + 1}, the first {self.execution.first_of},{program}"):
                self._train_step(batches)
                self._step_log.wait()
            if self._flops is not None and self._flops.problem is not None:
                say(f"note: no MFU, the model's operations cannot be counted: {self._flops.problem}")
            self._is_warm = True
            self._log()
        self._signals.rescue_by(None)

    def _wait_for_data(self, draw: Callable[[int], StepBatches | None]) -> StepBatches | None:
        with self._watchdog.phase(DATA), self._step_log.waiting():
            return self._signals.wait_for(lambda: draw(self.step))

    def _weighed(self, batches: StepBatches) -> StepBatches:
        with self._watchdog.phase(FIRST_STEP):  # the model may be run to find out
            weights = iter(self.label_weights.of([part for parts in batches.slices for part in parts]))
            return batches._replace(weights=[[next(weights) for _ in parts] for parts in batches.slices])

    def _train_step(self, batches: StepBatches) -> None:
        """Forward, backward and update, dispatched as one program; nothing is read back."""
        assert self._data is not None
        self._data.take()
        if not any(map(sum, batches.weights)):
            raise UserError(
                f"step {self.step + 1}: the batch has nothing to learn from (every label is -100)"
            )
        rates = {"learning_rate": self._set_learning_rate()} | other_rates(self.optimizer)
        update = self._update
        if self.execution.captures and not self._bad_steps.leaves_out_next:
            update = self._captured_update
        elif self.world.size > 1:
            update = self._common_update
        loss, grad_norm = update(*batches.counted)
        devices.flush(self.device)
        self._writer.let_write()
        self._count_step(batches.host, loss, grad_norm, rates)

    def _update(self, batches: list[Batch], shares: list[float]) -> tuple[Tensor, Tensor]:
        withheld = self._bad_steps.withheld_update()
        loss, grad_norm = self.compute_gradients(batches, shares)
        with withheld.where_bad(loss, grad_norm) if withheld else nullcontext():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grad_norm

    @cached_property
    def _captured_update(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return devices.captured(self._update, self._modules, self.optimizer)

    @cached_property
    def _common_update(self) -> Callable[..., tuple[Tensor, Tensor]]:
        return devices.region(self._update, self._modules, self.optimizer)

    @property
    def _modules(self) -> list[nn.Module]:
        return [each for each in (self.model, self.loss_fn) if isinstance(each, nn.Module)]

    def compute_gradients(self, batches: list[Batch], shares: list[float]) -> tuple[Tensor, Tensor]:
        """Forward and backward; returns the loss, and the norm of all gradients before clipping.

        `batches` and `shares`: see batches.counted.
        """
        with sequence_split(self.world.sequence):
            loss = self._accumulate_gradients(batches, shares)
        loss = self.world.mean(loss)
        limits = self.cfg.trainer
        return loss, clip_gradients(self.parameters, limits.max_grad_norm, limits.max_grad_value)

    def _accumulate_gradients(self, batches: list[Batch], shares: list[float]) -> Tensor:
        """Gradients of the mean over the labels of all micro-batches; returns that mean."""
        step_loss: Tensor | None = None
        for batch, share in zip(batches, shares, strict=True):
            loss = self.forward(batch)[0]
            if share != 1 or self.world.size > 1:  # ranks whose shares differ do the same operations
                loss = loss * share
            loss.backward()
            step_loss = loss.detach() if step_loss is None else step_loss + loss.detach()
        assert step_loss is not None
        return step_loss

    def forward(self, batch: Batch) -> tuple[Tensor, Any, Any]:
        """The mean loss of a batch, the model's output, and the target."""
        batch = batch_of.to_device(batch, self.device)
        with devices.autocast(self.device, self.cfg.execution.autocast):
            output, target = batch_of.call(self.execution.model, batch), batch_of.target_of(batch)
            return loss_of(output, target, self.loss_fn), output, target

    def _set_learning_rate(self) -> float:
        """Bring the learning rate to this step; returns it (with an LRScheduler that of the first group)."""
        if self._scheduled_by_config:
            factor = self.cfg.schedule.factor(self.step, self.cfg.trainer.steps)
            learning_rate = self.cfg.optim.learning_rate * factor
        elif callable(self.lr_scheduler):
            learning_rate = float(self.lr_scheduler(self.step))
        else:
            return float(self.optimizer.param_groups[0]["lr"])
        set_learning_rate(self.optimizer, learning_rate)
        return learning_rate

    def _count_step(self, batches: list[Batch], loss: Tensor, norm: Tensor, rates: dict[str, float]) -> None:
        if isinstance(self.lr_scheduler, LRScheduler):
            self.lr_scheduler.step()
        num_done = sum(batch_of.size(batch) for batch in batches)
        self.unit = "tokens" if batch_of.is_text(batches[0]) else "samples"
        self.step += 1
        self.num_done += num_done
        self._bad_steps.remember(self.step, batches)
        host = rates | {self.unit: self.num_done}
        num_flops = None if self._flops is None else self._flops.of_step(batches)
        self._step_log.end(self.step, loss, norm, num_done, host, num_flops)
        if self._is_warm:  # the first step is announced; a line in between would break that one
            for logger in self.loggers:
                logger.after_step(self.step)

    # -- once in a while -------------------------------------------------------------------------------------

    def _log_if_due(self) -> None:
        """The only place in the loop that reads the device, and lets the host wait for it."""
        if self._is_due(self.cfg.log.every) or self._evaluation_is_due() or self._save_is_due():
            self._log()

    def _evaluate_if_due(self) -> None:
        if self._evaluation_is_due():
            self.control.evaluate = False
            self._expect_compilation(self._is_warm and self.execution.is_new("validate"))
            self._evaluate()
            self._signals.rescue_by(None)

    def _agree(self) -> None:
        """Have all ranks know the same of signals, `control` and the write in flight."""
        with self._watchdog.phase(READING):
            self._agreement.reach()

    def _save_if_due(self) -> None:
        if self._writer.has_ended:
            self._end_save()
        if self._save_is_due():
            self.control.save = False
            self._begin_save()
            if not self.cfg.checkpoint.background:
                self._end_save()

    def _is_due(self, every: int | None) -> bool:
        return self._should_end() or (every is not None and self.step > 0 and self.step % every == 0)

    def _evaluation_is_due(self) -> bool:
        # A run ended by a signal evaluates when it goes on, at this same step, and has to leave quickly now.
        if self.val_loader is None or self.evaluated_at == self.step or self._signals.received is not None:
            return False
        return self.control.evaluate or self.step == 0 or self._is_due(self.cfg.trainer.evaluate_every)

    def _save_is_due(self) -> bool:
        is_wanted = self.control.save or self._is_due(self.cfg.checkpoint.every)
        return is_wanted and self.store is not None and self._saved_at != self.step

    def _should_end(self) -> bool:
        return self.step >= self.cfg.trainer.steps or self.control.stop or self._signals.received is not None

    def _log(self) -> None:
        with self._watchdog.phase(READING):
            records = self._step_log.drain(self.unit, self._agreement.slowest)
        if records:
            self._watchdog.learn(records)
            for logger in self.loggers:
                logger.log(records)
            self._tell("on_log", records)
            # `save` comes by here too: a bad state is never saved over a good one.
            self._bad_steps.judge(records)

    def _evaluate(self) -> None:
        result = self._evaluator.measure()
        if result is None:  # broken off by a signal
            return
        self.execution.has_run("validate")
        self.evaluated_at = self.step
        if self._saved_at == self.step:
            self._saved_at = None  # that checkpoint does not know of this evaluation
        record = {"step": self.step, "loss_hex": result["loss"].hex(), **result}
        is_best = self.best is None or result["loss"] < self.best["loss"]
        if is_best and math.isfinite(result["loss"]):
            self.best = {"step": self.step, "loss": result["loss"]}
        for logger in self.loggers:
            logger.log_evaluation(record)
        with rng.kept(self.device):  # what callbacks draw must not change the training, either
            self._tell("on_evaluate", record)
        self._bad_steps.judge_evaluation(record)
        self._agree()
        # What a metric or a callback left recorded must not become part of the next step's program.
        devices.flush(self.device)

    # -- evaluation ------------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Evaluate the model as it is: loss, metrics, seconds; of text, perplexity and bits per byte."""
        if self.val_loader is None:
            raise UserError("validate: the Trainer was given no val_loader")
        self._give_values()
        result = self._evaluator.measure()
        assert result is not None, "only fit() watches for signals"
        return result

    # -- saving and resuming ---------------------------------------------------------------------------------

    def save(self) -> Path:
        """Write the checkpoint of this step, `run_dir/checkpoints/step-N`, and return its path once it is
        complete. Raises RunFailedError where it cannot be written.

        Outside `fit`: UserError where another process trains in `run_dir`, or where that holds checkpoints
        of which this Trainer has loaded none.
        """
        if self.store is None:
            raise UserError("save: no run_dir was given, so there is nowhere to save to")
        self._give_values()
        with ExitStack() as stack:
            if not self._owns_run:
                stack.enter_context(self._owning_run())
                self._go_on_here(self.store)
            self._begin_save()
            written = self._end_save()
        assert written is not None
        if written.error is not None:
            raise RunFailedError(
                f"{written.path} cannot be saved ({written.error}): what came after the checkpoint before is "
                "lost; make room or mend the disk, and run again: it goes on from there"
            )
        return written.path

    def _begin_save(self) -> None:
        """Copy everything to the host, and have it written while training goes on."""
        assert self.store is not None
        self._end_save()
        self._log()
        for logger in self.loggers:
            logger.sync()  # a step that the checkpoint counts must not be missing from the log
        with self._watchdog.phase(SAVING):
            self._writer.start(self.store, self._snapshot())
        self._saved_at = self.step

    def _end_save(self) -> Written | None:
        """Wait for the write in flight, if there is one."""
        if not self._writer.is_busy:
            return None
        with self._watchdog.phase(SAVING):
            written = self._writer.finish(self._watchdog.go_on)
        if written.error is None:
            self._beginning = None
            self._tell("on_save", written.path)
        else:
            self._saved_at = None  # tried again at the next occasion, and at the latest at the end
        return written

    def _snapshot(self) -> Snapshot:
        with nullcontext() if self._data is None else self._data.as_not_drawn():
            return take_snapshot(
                self.step, self.model, self.tokenizer, self.optimizer, self.evaluation_weights, self._state
            )

    def _expect_compilation(self, is_likely: bool) -> None:
        """Have a thread act on signals where this one is too busy to, with the state as it is now."""
        # Ranks would have to gather the state for it together.
        if is_likely and self.store is not None and self.world.size == 1:
            self._log()  # a step that is saved must not be missing from the log
            snapshot = None if self._saved_at == self.step else self._snapshot()
            self._signals.rescue_by(self._writer.leaving_with(self.store, snapshot))
            if self.step == 0 and self._bad_steps.goes_back and self._saved_at != 0:
                self._beginning = snapshot

    def _state(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """All that a checkpoint holds beside tensors."""
        scheduler = self.lr_scheduler
        return {
            "step": self.step,
            self.unit: self.num_done,
            "unit": self.unit,
            "best": self.best,
            "evaluated_at": self.evaluated_at,
            "rng": rng.capture(self.device),
            "rng_of_other_ranks": self.world.of_all(rng.device_state(self.device))[1:],
            "data": None if self._data is None else self._data.state(),
            "optimizer": optimizer,
            "lr_scheduler": scheduler.state_dict() if isinstance(scheduler, LRScheduler) else None,
            "callbacks": state_of(self.callbacks),
            "bad_steps": self._bad_steps.state(),
            "padding": padding_of(self.model),
            "config": asdict(self.cfg),
            "versions": versions(),
        }

    def go_back(self, goes_on: bool) -> bool:
        """To the newest checkpoint or the beginning, if possible. `goes_on`: loggers forget the rest."""
        self._end_save()
        if self.store is None or self.run_dir is None or self._data is None or not self._data.can_go_back:
            return False
        if self.world.first(self.store.has_any):
            self.resume()
        elif self._beginning is None or self.step > 1000:  # as many steps are done again
            return False
        else:
            with self._beginning.written_in(self.run_dir) as directory:
                self.load(directory, "the run's beginning")
        self._step_log = self._new_step_log()
        for logger in self.loggers if goes_on else ():
            logger.close()
            logger.start(self.step, self.cfg.trainer.steps, True)
        return True

    def batches_of_next_step(self) -> StepBatches:
        """The micro-batches of step `step + 1`."""
        assert self._data is not None
        return self._weighed(self._data.draw(self.step))

    def repeat_step(self) -> None:
        """A step that was done before `go_back`; it is not logged again."""
        self.execution.before_step()
        with self._watchdog.phase(FIRST_STEP):
            self._train_step(self.batches_of_next_step())
            self._step_log.wait()
        self._step_log = self._new_step_log()

    def record_step(self) -> None:
        """A step of which nothing is read, on a device that only records (`parallel.abstract_step`)."""
        with self.execution.in_form("fused"):
            self._train_step(self.batches_of_next_step())

    @property
    def saved_at(self) -> int | None:
        """The step saved last, complete or still being written; None: the last one could not be."""
        return self._saved_at

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal has come, so that nothing long must be begun."""
        return self._signals.received is not None

    def resume(self, path: Path | str | None = None) -> bool:
        """Load the checkpoint at `path`, or the newest whole one of this run; False where there is none.

        A damaged checkpoint in the run is named, in `fit` renamed to `refused-step-N-1`, and passed over; a
        damaged one at `path` is an error, and so are checkpoints of which none is whole. With an older one at
        `path`, `fit` sets those after it aside: the run goes on from there.
        """
        if path is None:
            newest = None if self.store is None else self._newest(self.store)
            if newest is None:
                return False
            path = newest
        elif (reason := damage(Path(path))) is not None:
            raise UserError(f"{path} cannot be used: {reason}")
        self.load(Path(path))
        return True

    def _new_step_log(self) -> StepLog:
        return StepLog(self.device, self._peak_flops, self.world.size)

    def _newest(self, store: CheckpointStore) -> Path | None:
        return self.world.first(lambda: self._newest_here(store))

    def _newest_here(self, store: CheckpointStore) -> Path | None:
        is_anothers = not self._owns_run and self.run_dir is not None and is_locked(self.run_dir)
        if is_anothers or not (self._owns_run or store.may_change()):
            return CheckpointStore(store.directory).newest(say_refused)  # nothing is changed there
        with nullcontext() if self._owns_run else RunLock(self.run_dir):
            store.take_over()
            return store.newest(self._refuse)

    def _refuse(self, path: Path, reason: str, used: Path) -> None:
        assert self.store is not None
        aside = self.store.set_aside(path)
        say(f"checkpoint {path} refused: {reason}; it is {aside.name} now, and {used.name} is used")

    @understood
    def load(self, path: Path, name: str | None = None) -> None:
        """Take everything from the checkpoint at `path`, found whole, which people know by `name`."""
        state = contents.load_state(path)
        contents.load_model(self.model, path)
        self._initialize = None
        contents.load_lora_averages(self.model, path)
        self.evaluation_weights.begin(state["step"])
        contents.load_trained_weights(self.model, path)
        options = None if self._optimizer_is_given else progress_options(self.optimizer)
        contents.load_optimizer(self.optimizer, self.model, path, state["optimizer"], options)
        if isinstance(self.lr_scheduler, LRScheduler) and state["lr_scheduler"]:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        for kind in load_state_of(self.callbacks, state["callbacks"]):
            say(f"note: {path} holds state of a callback {kind}, which this run has not")
        if self._data is not None and state["data"] is not None:
            self._data.restore(state["data"])
        rng.restore(self.device, state["rng"])
        self._take_own_rng([state["rng"]["device"], *state.get("rng_of_other_ranks", [])])
        self.step, self.unit = state["step"], state["unit"]
        self.num_done = state[self.unit]
        self.best, self.evaluated_at = state["best"], state["evaluated_at"]
        if self.best is not None and not math.isfinite(self.best["loss"]):
            self.best = None  # earlier versions took a first evaluation of NaN for the best
        if "bad_steps" in state:  # the first checkpoints of all had none
            self._bad_steps.restore(state["bad_steps"])
        is_own = self.store is not None and self.store.holds(path)
        self._saved_at = self.step if is_own else None
        self._resumed = self._is_of_run = True
        # The next step's program must not hold the loading: in an uninterrupted run it would not.
        devices.flush(self.device)
        say(f"resumed from {name or path} at step {self.step} ({self.num_done:,} {self.unit})")
        if is_own and state.get("execution") is not None:  # what auto had measured
            form = state["config"]["execution"]["train"]
            say(f"note: execution.train was auto, which is gone; {form} takes its place")
        for key, (old, new) in changed_settings(state["config"], self.cfg).items() if is_own else ():
            if key != "run_dir":  # the same directory, by whatever name
                say(f"note: {key} is {spelled(new)} from here on, it was {spelled(old)}")
        rate, steps = self.cfg.optim.learning_rate, self.cfg.trainer.steps
        if self._scheduled_by_config and (
            note := jump(self.step, state["config"], self.cfg.schedule, rate, steps)
        ):
            say(note)

    # -- start and end ---------------------------------------------------------------------------------------

    @contextmanager
    def _running(self) -> Iterator[ScheduledCollection]:
        """What holds while the loop runs: the device's mode, the garbage collector's schedule, loggers."""
        with ExitStack() as stack:
            stack.enter_context(self.execution.phase("train"))
            garbage = stack.enter_context(ScheduledCollection(self.cfg.trainer.collect_garbage_every))
            for logger in self.loggers:
                stack.callback(logger.close)
            for callback in self.callbacks:
                stack.callback(callback.close)
            stack.callback(self._writer.wait, self._watchdog.go_on)  # whatever ends the run
            yield garbage

    def _start(self) -> None:
        if self._data is None:
            raise UserError("fit: the Trainer was given no train_loader")
        self._resume_or_begin()
        if self.step >= (steps := self.cfg.trainer.steps):
            say(f"finished: step {self.step} is done, trainer.steps={steps}; raise it to go on")
        for logger in self.loggers:
            logger.start(self.step, self.cfg.trainer.steps, self._resumed)
        self.model.train()
        devices.flush(self.device)
        self.control.save |= self._bad_steps.needs_checkpoint and self._saved_at is None
        self._tell("on_fit_start")
        self._agree()
        self._expect_compilation(not self._is_warm)

    def _resume_or_begin(self) -> None:
        if self._resumed:
            if self.store is not None:
                self._go_on_here(self.store)
                # Loaded from elsewhere: a process after this one would go on from what is here.
                self.control.save |= self._saved_at != self.step and self.store.has_any()
            return
        if self.store is not None:
            self.world.first(self.store.take_over)
        if self.cfg.checkpoint.resume == "never" and self.store is not None and self.store.has_any():
            raise UserError(
                f"{self.run_dir} holds checkpoints and checkpoint.resume=never: choose another run_dir, or "
                "checkpoint.resume=auto to go on"
            )
        if not self.resume():
            self._give_values()
            torch.manual_seed(self.cfg.seed)
            rng.seed_rank(self.device, self.cfg.seed, self.world.data_rank)
            if self.step == 0:
                self.evaluation_weights.begin(0)
        self._is_of_run = True

    def _give_values(self) -> None:
        """Initial ones, where the model has none yet."""
        if self._initialize is not None:
            with announced("making initial values"):
                with values_kept_exact(self.model, self.optimizer):
                    self._initialize(self.model)
            self._initialize = None

    def _take_own_rng(self, states: list[str | None]) -> None:
        """Each rank draws on its device from random numbers of its own; the host's are alike."""
        if len(states) == self.world.size:
            rng.restore_device(self.device, states[self.world.rank])
        else:
            say(
                f"note: the checkpoint was made by {len(states)} rank{'s' * (len(states) > 1)} and is loaded "
                f"by {self.world.size}: random numbers on the devices (dropout) go on otherwise"
            )
            rng.seed_rank(self.device, self.cfg.seed + self.step + 1, self.world.data_rank)

    def _go_on_here(self, store: CheckpointStore) -> None:
        """Have the run directory go on from this Trainer's state: what was saved after it is set aside."""
        self.world.first(lambda: self._claim(store))
        self._is_of_run = True

    def _claim(self, store: CheckpointStore) -> None:
        store.take_over()
        if not self._is_of_run and store.has_any():
            raise UserError(
                f"save: {self.run_dir} holds checkpoints, and this Trainer has loaded none of them: call "
                "resume() first, or choose another run_dir"
            )
        store.abandon_later(self.step)

    def _lock(self, stack: ExitStack) -> None:
        stack.enter_context(RunLock(self.run_dir))

    @contextmanager
    def _owning_run(self) -> Iterator[None]:
        """In here the run directory is this Trainer's alone. Raises UserError where it is another's."""
        with ExitStack() as stack:
            self.world.first(lambda: self._lock(stack))
            if self.run_dir is not None:
                self.world.check_shared(self.run_dir)
            self._owns_run = True
            try:
                yield
            finally:
                self._owns_run = False

    def _end(self) -> None:
        self._signals.rescue_by(None)
        self._agree()
        self._log_if_due()
        if self.step >= self.cfg.trainer.steps:
            self.execution.end_training()
        self._end_save()
        if self._save_is_due():
            self.save()  # a signal may have come before the first step, or after the last look at it
        self._tell("on_fit_end")

    def _tell(self, hook: str, *arguments: Any) -> None:
        with self._watchdog.phase(f"callbacks, {hook}"):
            for callback in self.callbacks:
                getattr(callback, hook)(self, *arguments)
