"""The Trainer: a model, its data and a configuration, and the loop that brings them together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from tputrain import device as devices
from tputrain import rng
from tputrain.announce import say
from tputrain.batches import Batch
from tputrain.callbacks.callback import Callback, Control
from tputrain.callbacks.config import build_callbacks
from tputrain.callbacks.events import EventLog
from tputrain.callbacks.recompile_budget import RecompileBudget
from tputrain.checkpoint.store import CheckpointStore
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.execution import Execution
from tputrain.feed import feed_of
from tputrain.guard.bad_steps import BadSteps, Verdict
from tputrain.loggers.config import build_loggers
from tputrain.loggers.logger import Logger
from tputrain.loop.checkpoints import Checkpoints
from tputrain.loop.evaluator import Evaluator
from tputrain.loop.first_runs import FirstRuns
from tputrain.loop.incoming import IncomingBatches
from tputrain.loop.initial_values import InitialValues
from tputrain.loop.label_weights import LabelWeights
from tputrain.loop.next_batches import NextBatches, StepBatches
from tputrain.loop.occasions import Occasions
from tputrain.loop.position import Clock, Position, count
from tputrain.loop.readings import Readings
from tputrain.loop.run_state import RunState
from tputrain.loop.session import session
from tputrain.loop.step import TrainStep
from tputrain.loop.step_hooks import step_hooks
from tputrain.loop.step_parts import StepParts, StepResult
from tputrain.loss import LossFunction
from tputrain.metrics.evaluation import evaluation_sets
from tputrain.metrics.named import Metric, metric_functions
from tputrain.models import transformers_masks
from tputrain.models.meta import allocate, move
from tputrain.optim.evaluation_weights import EvaluationWeights
from tputrain.optim.groups import freeze
from tputrain.optim.optimizer import create_state
from tputrain.optim.ownership import check_ownership
from tputrain.optim.rates import LearningRates
from tputrain.optim.schedule import LearningRate
from tputrain.parallel.agreement import AgreedControl, AgreedSignals, Agreement
from tputrain.parallel.auto import divided
from tputrain.parallel.limits import check_limits
from tputrain.parallel.same_batches import check_loader
from tputrain.parallel.world import World, join
from tputrain.parallel.writer import SharedWriter
from tputrain.short_settings import ShortSettings, with_short_settings
from tputrain.signals import SignalWatch
from tputrain.snapshot.background import BackgroundWriter
from tputrain.trainer_arguments import check_arguments, check_length, check_step, say_unused_settings
from tputrain.watchdog import READING, Watchdog


class Trainer(Position):
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

    `step` makes the step (`tputrain.loop.step`): a class of your own takes the place of `TrainStep`.
    `settings`: those of `tputrain.short_settings`, such as `steps=300, run_dir="runs/mine"`, over `cfg`'s.

    Raises UserError, one line, for what the caller can mend.
    """

    # What is trained, how, and what goes along.
    model: nn.Module
    cfg: RunConfig
    device: torch.device
    world: World
    optimizer: torch.optim.Optimizer
    train_step: TrainStep
    control: Control
    callbacks: list[Callback]
    loggers: list[Logger]

    def __init__(
        self,
        model: nn.Module,
        cfg: RunConfig | None = None,
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
        step: Callable[[StepParts], TrainStep] = TrainStep,
        **settings: Unpack[ShortSettings],
    ):
        cfg = with_short_settings(cfg, settings)
        check_arguments(
            model, cfg, loss_fn, optimizer, lr_scheduler, metrics, callbacks, loggers, initialize, step
        )
        super().__init__()
        self.cfg = cfg
        self.device = devices.find_device(cfg.device)
        self.world = join(cfg.parallel, self.device)
        say_unused_settings(cfg, optimizer, lr_scheduler)
        if cfg.parallel.auto:
            self.world = divided(self.world, model, cfg, train_loader, loss_fn)
        check_limits(self.world, cfg, model, loss_fn)
        self.model, is_alone = model, self.world.size == 1
        transformers_masks.register()
        move(self.device, model, loss_fn)
        self.execution = Execution(
            model, self.device, cfg.execution, lambda: self.step, cfg.trainer.length.steps, self._on_any_rank
        )
        freeze(self.model, cfg.optim.freeze)
        self._readings = Readings(self.model, loss_fn, self.device, self.world, cfg.log)
        self.world.parallelise(self.model, self.execution.compile_block, optimizer)
        allocate(self.model, self.device)
        self.loss_fn = loss_fn
        self.metrics = metric_functions(cfg.trainer.metrics) | dict(metrics or {})
        for name, loader in evaluation_sets(val_loader).items():
            check_loader(loader, f"val_loader{name and f' {name}'}", self.world, equal=False)
        self.val_loader, self.tokenizer = val_loader, tokenizer
        self.callbacks = [*callbacks, *build_callbacks(cfg.callbacks)]
        self.callbacks.append(RecompileBudget(cfg.trainer.recompile_budget))
        self.control = Control() if is_alone else AgreedControl()

        self.optimizer = (
            optimizer
            if optimizer is not None
            else cfg.optim.build(model, counts_on_device=self.execution.captures_training)
        )
        check_ownership(self.model, loss_fn, self.optimizer, lr_scheduler)
        create_state(self.optimizer)
        form, logged = self.execution, self._readings.logged
        parts = StepParts(model, self.optimizer, loss_fn, self.device, self.world, form, logged, cfg.trainer)
        self.train_step = step(parts)
        check_step(self.train_step, cfg)
        self.evaluation_weights = EvaluationWeights(model, self.optimizer, cfg.optim.ema_decay, self.device)

        self._data: NextBatches | None = None
        if train_loader is not None:
            check_loader(train_loader, "train_loader", self.world, equal=True)
            feed = feed_of(train_loader, self.device)
            self._data = NextBatches(feed, self.device, cfg.trainer.accumulate, self.world)
        self.run_dir = None if cfg.run_dir is None else Path(cfg.run_dir)
        self.store: CheckpointStore | None = None
        if self.run_dir is not None:
            self.store = CheckpointStore.of_run(self.run_dir, cfg.checkpoint)
            self.store.also_keeps = lambda steps: set().union(*(each.keeps(steps) for each in self.callbacks))
        self.loggers = []
        if self.world.is_first:  # this rank writes the news
            self.callbacks += [] if self.run_dir is None else [EventLog(self.run_dir)]
            self.loggers = [*build_loggers(cfg.log, self.run_dir, asdict(cfg)), *loggers]

        self._clock = Clock(self)
        by_config = optimizer is None and lr_scheduler is None
        check_length(cfg, by_config)
        self._rates = LearningRates(self.optimizer, lr_scheduler, by_config, cfg.optim, cfg.schedule)
        saves = self.store is not None
        self._signals = SignalWatch(saves) if is_alone else AgreedSignals(saves)
        self._due = Occasions(self, self._signals)
        self._bad_steps = BadSteps(self)
        self.train_step.withhold = self._bad_steps.withheld_update
        self._writer = BackgroundWriter() if is_alone else SharedWriter(self.world)
        self._agreement = Agreement(
            self.world, self.control, self._signals, self._writer, lambda: self._readings.host_seconds
        )
        rank = None if is_alone else self.world.rank
        self._watchdog = Watchdog(cfg.watchdog, self.run_dir, self.device, lambda: self.step, rank)
        self.label_weights = LabelWeights(self)
        self._evaluator = Evaluator(self, self._signals, self._agreement, self._watchdog)
        weights, watched = self.label_weights, (self._signals, self._watchdog, self._readings.waiting)
        if self._data is not None:
            self._incoming = IncomingBatches(self._data, weights, self.train_step, *watched)
        self._initial_values = InitialValues(self.model, self.optimizer, initialize)
        state = RunState(
            self, self._data, self._bad_steps, self._initial_values, self._rates, optimizer is None
        )
        keeps, saved = self._bad_steps.goes_back, lambda path: self._tell("on_save", path)
        self._checkpoints = Checkpoints(self, state, self._writer, self._watchdog, keeps, saved)
        rescue, wait = self._checkpoints.rescue, self._readings.wait
        self._first_runs = FirstRuns(self.execution, self.device, self._signals, self._watchdog, rescue, wait)

    # -- the loop --------------------------------------------------------------------------------------------

    def fit(self) -> None:
        """Train up to step `cfg.trainer.steps`, or for `cfg.trainer.duration`.

        Evaluations and checkpoints are made on the way.

        On SIGINT or SIGTERM the step is ended, a checkpoint written and Interrupted (a SystemExit) raised.
        """
        self.control.stop = False  # of an earlier fit
        with session(self, self._checkpoints, self._signals, self._watchdog, self._writer) as garbage:
            self._start()
            self._evaluate_if_due()
            self._save_if_due()
            while not self._due.end:
                if (batches := self._incoming.draw(self.step)) is None:  # a signal came first
                    break
                is_new = self._first_runs.is_new(batches.form)
                # Before the state is copied, to be saved at a signal while a program compiles.
                if is_new and self._checkpoints.can_rescue and self._went_back(self._read()):
                    continue
                self._bad_steps.replay_if_due(batches.host)
                with self._first_runs.step(self.step + 1, is_new) as is_to_begin:
                    if not is_to_begin:
                        break
                    batches = self._incoming.take(batches, self.step)
                    self._readings.begin_step()
                    self._begin_step(batches.epoch)
                    rates = self._rates.set(self.step, self._due.total_steps)
                    result = self.train_step(*batches.counted, not self._bad_steps.leaves_out_next)
                    self._count(batches, result, rates)
                if self._bad_steps.examined is not None:  # done again on the way to a bad step: not logged
                    self._readings.read(self.unit)
                    continue
                if self._due.draw_ahead:  # before values are read, so that the device has them by then
                    self._incoming.draw_ahead(self.step)
                with self._readings.after_step():
                    self._tell("on_step_end")
                self._agree()
                if self._went_back(self._log_if_due()):
                    continue
                self._evaluate_if_due()
                self._save_if_due()
                garbage.after_step(self.step)
            self._end()

    def _begin_step(self, epoch: int | None) -> None:
        if epoch is not None and epoch != self.epoch:
            self.epoch = epoch
            self._tell("on_epoch_start", epoch)
        self._tell("on_step_start")

    def _count(self, batches: StepBatches, result: StepResult, rates: dict[str, float]) -> None:
        """The step was dispatched."""
        self._writer.let_write()
        self._rates.after_step()
        count(self, batches)
        self._clock.read()
        self._bad_steps.remember(self.step, batches.host)
        self._readings.end_step(self.step, batches.host, result, rates | {self.unit: self.num_done})
        if not self._first_runs.is_first_step:  # that is announced; a line in between would break that one
            for logger in self.loggers:
                logger.after_step(self.step)

    # -- once in a while -------------------------------------------------------------------------------------

    def _log_if_due(self) -> Verdict | None:
        """The only place in the loop that reads the device, and lets the host wait for it."""
        return self._read() if self._due.log or self._first_runs.is_first_step else None

    def _read(self) -> Verdict | None:
        """Read and log the values of all steps since the last time; returns what they say of the run."""
        with self._watchdog.phase(READING):
            records = self._readings.read(self.unit, self._agreement.slowest)
        if not records:
            return None
        self._watchdog.learn(records, self._first_runs.is_first_step)
        if self._first_runs.is_first_step and (why := self._readings.not_counted) is not None:
            say(f"note: no MFU, the model's operations cannot be counted: {why}")
        for logger in self.loggers:
            logger.total_steps = self._due.total_steps
            logger.log(records)
        self._tell("on_log", records)
        return self._bad_steps.judge(records)

    def _went_back(self, verdict: Verdict | None) -> bool:
        """Act on what the steps so far say: whether the run is at an earlier step now.

        Raises UserError where it is to stop, or there is nothing to go back to.
        """
        if verdict is None:
            return False
        assert self._data is not None
        is_possible = verdict.goes_back and self._signals.received is None and self._data.can_go_back
        if not (is_possible and self._checkpoints.go_back()):
            raise self._bad_steps.stopped(verdict)
        self._readings.forget()
        self._watchdog.went_back()
        self._bad_steps.went_back(verdict)
        for logger in self.loggers if self._bad_steps.examined is None else ():
            logger.close()
            logger.start(self.step, self._due.total_steps, True)
        return True

    def _agree(self) -> None:
        """Have all ranks know the same of signals, `control` and the write in flight."""
        self.control.stop |= self._due.time_is_up
        self.control.save |= self._due.time_to_save
        with self._watchdog.phase(READING):
            self._agreement.reach()

    def _evaluate_if_due(self) -> None:
        if not self._due.evaluate:
            return
        self.control.evaluate = False
        with self._first_runs.evaluation():
            record = self._evaluator.evaluate()
        if record is None:  # broken off by a signal
            return
        self._checkpoints.forget_step(self.step)  # that checkpoint does not know of this evaluation
        for logger in self.loggers:
            logger.log_evaluation(record)
        with rng.kept(self.device):  # what callbacks draw must not change the training, either
            self._tell("on_evaluate", record)
        self._bad_steps.judge_evaluation(record)
        self._agree()
        # What a metric or a callback left recorded must not become part of the next step's program.
        devices.flush(self.device)

    def _save_if_due(self) -> None:
        if self._writer.has_ended:
            self._checkpoints.end()
        if self._due.save:
            self.control.save = False
            self._checkpoints.begin()
            if not self.cfg.checkpoint.background:
                self._checkpoints.end()

    # -- beside the loop -------------------------------------------------------------------------------------

    def validate(self) -> dict[str, float]:
        """Evaluate the model as it is: loss, metrics, seconds; of text, perplexity and bits per byte."""
        if self.val_loader is None:
            raise UserError("validate: the Trainer was given no val_loader")
        self._initial_values.give()
        result = self._evaluator.measure()
        assert result is not None, "only fit() watches for signals"
        return result

    def predict(self, loader: Iterable[Batch]) -> list[Any]:
        """What the model returns for each batch of `loader`, on the host. It is in evaluation mode, with the
        weights that evaluations use. A batch needs no target: a tensor, a list of one, or a dict.

        All of it stays in memory. With several ranks each runs all batches and has all outputs; UserError
        with `parallel.context`.
        """
        if self.world.context_size > 1:
            raise UserError("predict: expected parallel.context=1, where each rank has whole sequences")
        self._initial_values.give()
        return self._evaluator.predict(loader)

    def log(self, name: str, value: Tensor | float) -> None:
        """Log a number with the step under way, from the model, its loss, a callback or a step of your own.

        A tensor of one element stays on the device until the next log step reads it. What a step logs several
        times is averaged, and so is what several ranks log. In an evaluation the mean over its labels is in
        the evaluation's record. UserError where `value` is no number, or a record has `name` anyway.
        """
        self._readings.logged.add(name, value)

    def save(self) -> Path:
        """Write the checkpoint of this step, `run_dir/checkpoints/step-N`, and return its path once it is
        complete. Raises RunFailedError where it cannot be written.

        UserError where a step since the last log step was bad. Outside `fit`, also where another process
        trains in `run_dir`, or where that holds checkpoints of which this Trainer has loaded none.
        """
        if self.store is None:
            raise UserError("save: no run_dir was given, so there is nowhere to save to")
        self._initial_values.give()
        if (verdict := self._read()) is not None:
            raise self._bad_steps.stopped(verdict)
        return self._checkpoints.save()

    @property
    def saved_at(self) -> int | None:
        """The step saved last, complete or still being written; None: the last one could not be."""
        return self._checkpoints.saved_at

    def resume(self, path: Path | str | None = None, is_checked: bool = False) -> bool:
        """Load the checkpoint at `path`, or the newest whole one of this run; False where there is none.

        A damaged checkpoint in the run is named, in `fit` renamed to `refused-step-N-1`, and passed over; a
        damaged one at `path` is an error, and so are checkpoints of which none is whole. With an older one at
        `path`, `fit` sets those after it aside: the run goes on from there. `is_checked`: it is known to be
        whole, so that its checksums are not compared again.
        """
        return self._checkpoints.resume(None if path is None else Path(path), is_checked)

    # -- start and end ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._clock.start()
        if self._data is None:
            raise UserError("fit: the Trainer was given no train_loader")
        if not self._checkpoints.begin_run():
            self._initial_values.give()
            torch.manual_seed(self.cfg.seed)
            rng.seed_rank(self.device, self.cfg.seed, self.world.data_rank)
            if self.step == 0:
                self.evaluation_weights.begin(0)
        self.execution.after_step()  # the next step's form, wherever the run goes on
        if self._due.is_done:
            say(f"finished: step {self.step} is done, {self.cfg.trainer.length.setting}; raise it to go on")
        for logger in self.loggers:
            logger.start(self.step, self._due.total_steps, self._checkpoints.has_loaded)
        self.train_step.hooks = step_hooks(self.callbacks, self)
        self.model.train()
        devices.flush(self.device)
        self.control.save |= self._bad_steps.needs_checkpoint and self.saved_at is None
        self._tell("on_fit_start")
        self._agree()
        self._went_back(self._read())  # of a fit before this one, which an error ended

    def _end(self) -> None:
        if (examined := self._bad_steps.examined) is not None:  # a signal came on the way to it
            raise self._bad_steps.stopped(examined)
        self._agree()
        self._went_back(self._log_if_due())
        if self._due.is_done:
            self.execution.end_training()
        self._checkpoints.end()
        if self._due.save:
            self.save()  # a signal may have come before the first step, or after the last look at it
        self._tell("on_fit_end")

    def _on_any_rank(self, here: bool) -> bool:
        return bool(self.world.largest([int(here)])[0])

    def _tell(self, hook: str, *arguments: Any) -> None:
        with self._watchdog.phase(f"callbacks, {hook}"):
            for callback in self.callbacks:
                getattr(callback, hook)(self, *arguments)
