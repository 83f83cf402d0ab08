"""Whether what the Trainer was given is of the kinds that it takes, said before anything is done with it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import isclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.config import RunConfig
from tputrain.config_checks import did_you_mean, nearest
from tputrain.config_differences import changed_settings
from tputrain.errors import UserError
from tputrain.loggers.logger import Logger
from tputrain.loop.step import TrainStep
from tputrain.metrics.evaluation import MEASURED
from tputrain.models.meta import is_on_meta
from tputrain.optim.config import OptimConfig
from tputrain.optim.schedule import ScheduleConfig

_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def check_arguments(
    model: Any,
    cfg: Any,
    loss_fn: Any,
    optimizer: Any,
    lr_scheduler: Any,
    metrics: Any,
    callbacks: Any,
    loggers: Any,
    initialize: Any,
    step: Any,
) -> None:
    """Raise UserError, one line, for the first of the Trainer's arguments that is of another kind. Says which
    settings of `cfg` are not used beside the others.
    """
    _expect(isinstance(model, nn.Module), "model", model, "a torch.nn.Module")
    _expect(
        "_orig_mod" not in model._modules,
        "model",
        model,
        "the module that was given to torch.compile, as checkpoints have its names; "
        "RunConfig(execution=ExecutionConfig(train='compile')) compiles it",
    )
    if is_on_meta(model):
        _expect(
            callable(initialize),
            "initialize",
            initialize,
            "a function that gives the model, whose parameters are on the meta device, values in place",
        )
    else:
        _expect(initialize is None, "initialize", initialize, "None: the model has its values")
    _expect(
        isinstance(cfg, RunConfig),
        "cfg",
        cfg,
        "a RunConfig, such as RunConfig(run_dir='runs/mine', trainer=TrainerConfig(steps=300))",
    )
    is_loss = loss_fn is None or (callable(loss_fn) and not isclass(loss_fn))
    _expect(
        is_loss, "loss_fn", loss_fn, "a function of (output, target), such as torch.nn.functional.mse_loss"
    )
    is_optimizer = optimizer is None or isinstance(optimizer, torch.optim.Optimizer)
    _expect(is_optimizer, "optimizer", optimizer, "a torch.optim.Optimizer on model.parameters()")
    _check_scheduler(lr_scheduler)
    _check_metrics(metrics, cfg.trainer.metrics)
    for callback in _each("callbacks", callbacks, Callback):
        _check_hooks(callback)
    _each("loggers", loggers, Logger)
    _expect(callable(step), "step", step, "a subclass of tputrain.TrainStep, or a function that makes one")


def say_unused_settings(cfg: RunConfig, optimizer: Any, lr_scheduler: Any) -> None:
    """Name the settings of `cfg` that do nothing beside an optimizer or a scheduler that was given."""
    if optimizer is not None:
        own = replace(cfg.optim, freeze=[], ema_decay=None)  # these are used with any optimizer
        changed = [f"optim.{key}" for key in changed_settings(asdict(OptimConfig()), own)]
        _say_unused(changed, "an optimizer")
    if optimizer is not None or lr_scheduler is not None:
        changed = [f"schedule.{key}" for key in changed_settings(asdict(ScheduleConfig()), cfg.schedule)]
        if optimizer is None and cfg.optim.learning_rate != OptimConfig().learning_rate:
            changed.append("optim.learning_rate")
        _say_unused(changed, "an optimizer" if lr_scheduler is None else "an lr_scheduler")


def _say_unused(keys: Sequence[str], given: str) -> None:
    if keys:
        say(f"note: {', '.join(keys)}: not used, the Trainer was given {given}")


def check_length(cfg: RunConfig, rate_is_by_config: bool) -> None:
    """Raise UserError where the schedule needs a number of steps that a run by time has not."""
    length, schedule = cfg.trainer.length, cfg.schedule
    needs_steps = rate_is_by_config and schedule.name != "constant" and schedule.steps is None
    if needs_steps and length.unit == "seconds":
        raise UserError(
            f"{length.setting}: expected schedule.name=constant, or schedule.steps: the number of "
            "steps is not known beforehand"
        )


def check_step(step: Any, cfg: RunConfig) -> None:
    """Raise UserError unless `step`, which a user's class or function has made, is one that `cfg` can use."""
    if not isinstance(step, TrainStep):
        raise UserError(f"Trainer: step returned {_describe(step)}: expected a tputrain.TrainStep")
    withholds = cfg.trainer.on_nonfinite in ("skip", "rollback")
    if withholds and type(step).update is not TrainStep.update:
        raise UserError(
            f"trainer.on_nonfinite={cfg.trainer.on_nonfinite}: {type(step).__name__} has an update() of its "
            "own, and only TrainStep's can be left out; override gradients() or optimizer_step() instead, or "
            "set trainer.on_nonfinite=stop"
        )


def _check_scheduler(lr_scheduler: Any) -> None:
    is_known = isinstance(lr_scheduler, LRScheduler) or callable(lr_scheduler)
    _expect(
        lr_scheduler is None or (is_known and not isclass(lr_scheduler)),
        "lr_scheduler",
        lr_scheduler,
        "a function of the step or one of torch.optim.lr_scheduler; "
        "RunConfig(schedule=ScheduleConfig(name='cosine')) names one",
    )
    _expect(
        not isinstance(lr_scheduler, ReduceLROnPlateau),
        "lr_scheduler",
        lr_scheduler,
        "a scheduler that needs no metric; step this one in a callback's on_evaluate, by result['loss']",
    )


def _check_metrics(metrics: Any, named: Sequence[str]) -> None:
    """`named`: the metrics that the configuration asks for."""
    expected = (
        "a mapping of names to functions of (output, target); TrainerConfig(metrics=[...]) takes known names"
    )
    _expect(metrics is None or isinstance(metrics, Mapping), "metrics", metrics, expected)
    for name, function in (metrics or {}).items():
        _expect(callable(function), f"metrics[{name!r}]", function, "a function of (output, target)")
        taken = name in MEASURED or name in named
        if taken or not isinstance(name, str) or "/" in name:
            reason = "evaluations have a number of that name" if taken else "names are text without '/'"
            raise UserError(
                f"Trainer: metrics has {name!r}: {reason}, expected another name, such as 'my_{_word(name)}'"
            )


def _word(name: Any) -> str:
    return "_".join(re.findall(r"\w+", str(name))) or "metric"


def _each(name: str, given: Any, kind: type) -> list[Any]:
    """The elements of `given`, all of which are of `kind`."""
    is_many = isinstance(given, Iterable) and not isinstance(given, str | Mapping)
    _expect(is_many, name, given, f"a list of tputrain.{kind.__name__}")
    elements = list(given)
    for index, element in enumerate(elements):
        _expect(isinstance(element, kind), f"{name}[{index}]", element, f"a tputrain.{kind.__name__}")
    return elements


def _check_hooks(callback: Callback) -> None:
    """A hook by another library's name would never be called, and nobody would know."""
    for name in dir(callback):
        if name.startswith("on_") and name not in _HOOKS and callable(getattr(callback, name)):
            hint = did_you_mean(nearest(name, _HOOKS))
            raise UserError(
                f"callback {type(callback).__name__}: nothing calls its {name}: "
                f"expected one of {', '.join(_HOOKS)}{hint}"
            )


def _expect(holds: bool, name: str, given: Any, expected: str) -> None:
    if not holds:
        raise UserError(f"Trainer: {name} is {_describe(given)}: expected {expected}")


def _describe(given: Any) -> str:
    if isclass(given):
        return f"the class {given.__name__}, not an object of it"
    return repr(given) if isinstance(given, str | int | float) else f"a {type(given).__name__}"
