"""The same job with other settings of its recipe: what a plan proposes was planned with them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tputrain.parallel.candidate import Candidate, Task, best, candidates
from tputrain.parallel.layout import Layout

Settings = Mapping[str, Any]
"""Values by their keys in a recipe: {"optim.master_weights": True}."""
_MANY = 4000  # candidates; of more, a variant is judged in the fastest layouts alone
_FASTEST = 256


@dataclass(frozen=True)
class Variant:
    """A task with other settings."""

    settings: str
    """As overrides."""
    task: Task


class Variants(ABC):
    """Of a job with a recipe."""

    sizes: Mapping[str, int]
    """Of the model, by their keys; empty where the recipe cannot change them."""
    undividing_phases: Sequence[str]
    """Those whose form of steps context and tensor parallelism do not take."""
    has_fixed_sizes: bool
    """Whether the model's sizes cannot be changed: it begins with weights that are there."""

    @abstractmethod
    def value(self, key: str) -> Any:
        """What the recipe says."""

    @abstractmethod
    def of(self, task: Task, settings: Settings) -> Variant | None:
        """`task`, with these settings of its recipe. None: the recipe does not take them."""


def overrides(settings: Settings) -> str:
    """As on the command line."""
    return " ".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()
    )


def planned(task: Task, found: Sequence[Candidate] = ()) -> Candidate | None:
    """The best candidate that may be chosen.

    `found`: candidates of a task on the same topology. Of very many the fastest ones' layouts are judged.
    """
    among = _fastest(task, found) if len(found) > _MANY else None
    return best([each for each in candidates(task, among) if each.code == "slower"])


def _fastest(task: Task, found: Sequence[Candidate]) -> list[Layout]:
    fitting = [each for each in found if each.code in ("slower", "chosen")]
    fitting.sort(key=lambda each: each.weighed_seconds)
    layouts = {id(each.layout): each.layout for each in fitting}
    tensor, context = task.workload.tensor_degrees, task.workload.context_degrees
    return [
        each
        for each in layouts.values()
        if each.degrees["tensor"] in tensor and each.degrees["context"] in context
    ][:_FASTEST]
