"""A run as its directory tells it: steps, evaluations, events, checkpoints, configuration, environment."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.integrity import COMPLETE
from tputrain.checkpoint.state import STATE, load_state
from tputrain.checkpoint.store import CheckpointStore
from tputrain.errors import UserError
from tputrain.loggers.jsonl import EVALUATIONS, EVENTS, STEPS, read_jsonl
from tputrain.loggers.logger import Record
from tputrain.run_lock import is_locked


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is in the run directory now; whether it is whole is for its reader to find out."""

    step: int
    path: Path
    saved_at: float
    """Seconds since 1970."""


@dataclass(frozen=True)
class Run:
    """All that a run directory says. What was not recorded is empty."""

    directory: Path
    name: str
    steps: list[Record]
    evaluations: list[Record]
    events: list[Record]
    checkpoints: list[Checkpoint]
    """Oldest first."""
    config: dict[str, Any]
    changed: dict[str, Any]
    """What of the configuration is not the default, by dotted key."""
    environment: dict[str, str]
    command: str
    """The command line of the last process that started."""
    is_running: bool

    @property
    def step(self) -> int:
        """The last step that was logged or saved."""
        logged = [record["step"] for record in self.steps[-1:]]
        return max([0, *logged, *(checkpoint.step for checkpoint in self.checkpoints)])

    @property
    def num_steps(self) -> int | None:
        """Steps that were asked for; None where nothing says it."""
        trainer = self.config.get("trainer")
        if not isinstance(trainer, dict):
            return None
        steps = trainer.get("steps")
        if trainer.get("duration") is not None:  # known once that has passed
            ended = self.events[-1] if self.events else {}
            steps = ended.get("step") if ended.get("finished") else None
        return steps if isinstance(steps, int) else None

    @property
    def state(self) -> str:
        """`running`, `finished`, `not saved` (its last step is in no checkpoint) or `stopped`."""
        if self.is_running:
            return "running"
        if self.num_steps is None or self.step < self.num_steps:
            return "stopped"
        saved: list[int] = []
        for event in (event for event in self.events if is_number(event.get("step"))):
            if event.get("event") == "started":  # it goes on from there: what came after is undone
                saved = [step for step in saved if step <= event["step"]]
            elif event.get("event") == "saved":
                saved.append(event["step"])
        saved += [checkpoint.step for checkpoint in self.checkpoints]
        return "finished" if max(saved, default=0) >= self.num_steps else "not saved"

    @property
    def starts(self) -> list[Record]:
        """The event of each process that trained here, the first one and those that resumed."""
        return [event for event in self.events if event.get("event") == "started"]

    @property
    def changed_at(self) -> float:
        """When something was last written here, in seconds since 1970."""
        files = [self.directory / name for name in (STEPS, EVALUATIONS, EVENTS)]
        written = [file.stat().st_mtime for file in files if file.is_file()]
        return max([0.0, *written, *(checkpoint.saved_at for checkpoint in self.checkpoints)])


def is_run(directory: Path) -> bool:
    """Whether a run was ever started in `directory`."""
    return (directory / STEPS).is_file() or (directory / CHECKPOINTS).is_dir()


def read_run(directory: Path) -> Run:
    """Read a run directory, of a run that may still go on. Raises UserError where there is none."""
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such directory; expected the directory of a run, such as runs/llama"
        )
    if not is_run(directory):
        raise UserError(
            f"{directory}: no run (neither {STEPS} nor {CHECKPOINTS}/); expected one such as runs/llama"
        )
    try:
        steps, evaluations, events = (read_jsonl(directory / name) for name in (STEPS, EVALUATIONS, EVENTS))
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from None
    checkpoints = _checkpoints(directory)
    made_with = _made_with(events, checkpoints)
    changed = made_with.get("changed")
    return Run(
        directory,
        directory.resolve().name,
        _in_order(steps),
        _in_order(evaluations),
        _in_order(events, by="time"),
        checkpoints,
        made_with["config"],
        changed if isinstance(changed, dict) else {},
        made_with["environment"],
        str(made_with.get("command", "")),
        is_locked(directory),
    )


def _in_order(records: list[Record], by: str = "step") -> list[Record]:
    """Those that have a number there, sorted by it."""
    return sorted((record for record in records if is_number(record.get(by))), key=lambda record: record[by])


def is_number(value: Any) -> bool:
    """A number that arithmetic stands: JSON as Python reads it may also hold NaN, true, 1e308."""
    return type(value) in (int, float) and abs(value) < 1e100


def _checkpoints(directory: Path) -> list[Checkpoint]:
    store = CheckpointStore(directory / CHECKPOINTS)
    found = []
    for step in reversed(store.steps()):
        sealed = store.path(step) / COMPLETE  # written last
        if sealed.is_file():
            found.append(Checkpoint(step, store.path(step), sealed.stat().st_mtime))
    return found


def _made_with(events: list[Record], checkpoints: list[Checkpoint]) -> dict[str, Any]:
    """Configuration and environment, and what else is known: of the last process that started, else of the
    newest checkpoint.
    """
    for event in reversed(events):
        if all(isinstance(event.get(key), dict) for key in ("config", "environment")):
            return event
    for checkpoint in reversed(checkpoints):
        if (checkpoint.path / STATE).is_file():
            state = load_state(checkpoint.path)
            return {"config": state["config"], "environment": state["versions"]}
    return {"config": {}, "environment": {}}
