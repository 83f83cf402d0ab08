"""The options that a script gives its optimizer and its scheduler, and which of them a resume undoes."""

import inspect
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tputrain import exact_json
from tputrain.optim.joint import JointOptimizer
from tputrain.optim.schedule import LearningRate

Options = dict[str, list[dict[str, Any]]]
"""For each group of each optimizer, and for a scheduler, named by their class: values by name, as JSON."""


class GivenOptions:
    """What an optimizer and its scheduler were given, as a checkpoint keeps it beside their state.

    As in PyTorch's `load_state_dict`, that state holds the options, too, and by then schedules and callbacks
    may have changed them. So only what was given in the beginning tells whether the script was changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: LearningRate | None):
        self._optimizer, self._scheduler = optimizer, scheduler
        self._here = _options(optimizer, scheduler)
        self._of_run: Options | None = self._here

    def state(self) -> Options | None:
        """What was given at the start of the run; None: it began before checkpoints kept that."""
        return self._of_run

    def restore(self, state: Options | None) -> list[str]:
        """Take what `state` gave, after optimizer and scheduler were loaded.

        Returns a line for each option that the script has changed and that has the checkpoint's value.
        """
        is_known, self._of_run = state == self._of_run, state
        # Some schedulers set options when they are built (OneCycleLR the momentum). With one of another class
        # it is not clear what the script itself has changed.
        if state is None or is_known or state.keys() != self._here.keys():
            return []
        loaded, notes = _options(self._optimizer, self._scheduler), []
        for owner, groups in self._here.items():
            for here, before, now in zip(groups, state[owner], loaded[owner], strict=True):
                for name in here.keys() & before.keys() & now.keys():
                    if here[name] not in (before[name], now[name]):
                        notes.append(
                            f"note: {owner} is given {name}={here[name]}, the checkpoint's run began with "
                            f"{before[name]}: the checkpoint's value stays, as with PyTorch's load_state_dict"
                        )
        return sorted(set(notes))


def _options(optimizer: torch.optim.Optimizer, scheduler: LearningRate | None) -> Options:
    found: Options = {}
    for part in optimizer.parts if isinstance(optimizer, JointOptimizer) else [optimizer]:
        # A scheduler of PyTorch's keeps the rate that was given under another name.
        groups = [group | {"lr": group.get("initial_lr", group.get("lr"))} for group in part.param_groups]
        if callable(scheduler):  # it makes the rate, whatever was given
            groups = [{name: value for name, value in group.items() if name != "lr"} for group in groups]
        found.setdefault(type(part).__name__, []).extend(_parameters(part, group) for group in groups)
    if isinstance(scheduler, LRScheduler):
        values = {name: value for name, value in scheduler.state_dict().items() if name != "last_epoch"}
        found[type(scheduler).__name__] = [_parameters(scheduler, values)]
    return found


def _parameters(owner: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that are parameters of the owner's constructor: others count how far it has come."""
    names = inspect.signature(type(owner)).parameters
    found = {}
    for name, value in values.items():
        if name in names and name != "params":
            try:
                found[name] = exact_json.loads(exact_json.dumps(value))
            except TypeError:  # a tensor or a function, which checkpoints do not hold
                continue
    return found
