"""What `trainer.log` is given: numbers of a step or an evaluation, on the device until they are read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tputrain.config_checks import spelled
from tputrain.errors import UserError
from tputrain.metrics.evaluation import MEASURED
from tputrain.metrics.step_log import RECORDED
from tputrain.parallel.world import World

Logged = dict[str, Tensor | float]


class LoggedValues:
    """Collects named numbers. What is given several times is averaged."""

    def __init__(self) -> None:
        self._collections: list[dict[str, list[Tensor | float]]] = [{}]

    def add(self, name: str, value: Any) -> None:
        """Raises UserError where `value` is no number, or `name` is taken. The device is not read."""
        is_name = isinstance(name, str) and name
        if not is_name or name in (*RECORDED, *MEASURED) or name.startswith("learning_rate"):
            raise UserError(
                f"trainer.log({name!r}, ...): expected a name that no record has yet, such as 'my_{name}'"
            )
        self._collections[-1].setdefault(name, []).append(_number(name, value))

    @contextmanager
    def collected(self) -> Iterator[dict[str, list[Tensor | float]]]:
        """What is given in here is put into the dict alone; see `means`."""
        collection: dict[str, list[Tensor | float]] = {}
        self._collections.append(collection)
        try:
            yield collection
        finally:
            self._collections.pop()

    def taken(self) -> Logged:
        """The means of what was given outside of `collected` since the last time."""
        taken, self._collections[0] = means(self._collections[0]), {}
        return taken


def means(collection: Mapping[str, Sequence[Tensor | float]]) -> Logged:
    """Of each name."""
    return {name: _mean(values) for name, values in collection.items()}


def expect_tensors(collection: Mapping[str, Sequence[Tensor | float]]) -> None:
    """Raise UserError at a number of Python's: a step that is replayed would give it again and again."""
    for name, values in collection.items():
        for value in values:
            if not isinstance(value, Tensor):
                raise UserError(
                    f"trainer.log({name!r}, ...): {value}: expected a tensor with execution.train=captured, "
                    "whose steps are replayed without their Python"
                )


def read_on_all_ranks(steps: Sequence[Logged], world: World) -> list[dict[str, float]]:
    """Of some steps the numbers of each, averaged over those ranks that gave them. All ranks call it."""
    own = [{name: float(value) for name, value in step.items()} for step in steps]
    if world.size == 1:
        return own
    averaged = []
    for of_ranks in zip(*world.of_all(own), strict=True):
        names = dict.fromkeys(name for each in of_ranks for name in each)
        given = {name: [each[name] for each in of_ranks if name in each] for name in names}
        averaged.append({name: sum(values) / len(values) for name, values in given.items()})
    return averaged


def _number(name: str, value: Any) -> Tensor | float:
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        number = value.detach()
        if hasattr(number, "full_tensor"):  # ranks have parts of it
            number = number.full_tensor()
        return number.reshape(()).to(torch.float32, copy=True)
    if isinstance(value, int | float):
        return float(value)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else spelled(value)
    raise UserError(f"trainer.log({name!r}, ...): {what}: expected a number or a tensor of one element")


def _mean(values: Sequence[Tensor | float]) -> Tensor | float:
    if len(values) == 1:
        return values[0]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if not tensors:
        return sum(values) / len(values)
    device = tensors[0].device
    numbers = [torch.as_tensor(each, dtype=torch.float32, device=device) for each in values]
    return torch.stack(numbers).mean()
