"""Weights & Biases: one run there for one run here, however many processes it takes."""

import json
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tputrain.announce import say
from tputrain.config_checks import Settings, expect_choice
from tputrain.errors import UserError, first_line
from tputrain.loggers.jsonl import EVALUATIONS, STEPS, read_jsonl
from tputrain.loggers.logger import Logger, Record, expect_run_dir, numbers_of
from tputrain.reachable import why_unreachable

if TYPE_CHECKING:
    import wandb

ID_FILE = "wandb-run.json"
"""In the run directory: the id of the run at Weights & Biases."""
_EVALUATED_AT = "evaluation/step"


@dataclass(frozen=True)
class WandbConfig(Settings):
    """Whether and how a run is sent to Weights & Biases."""

    mode: str = "off"
    """off; online; offline: written to `run_dir/wandb`, for `wandb sync`. Online needs a network, else it is
    offline."""
    project: str = "tputrain"
    entity: str | None = None
    """The user or team that the project belongs to; None: the default of whoever is logged in."""
    name: str | None = None
    """How the run is shown; None: the name of its directory."""

    def __post_init__(self) -> None:
        expect_choice("log.wandb.mode", self.mode, ("off", "online", "offline"))


class WandbLogger(Logger):
    """Logs steps as `train/...` and evaluations as `evaluation/...` to a run whose id is kept in `run_dir`.

    Each step is there once because `metrics.jsonl`, which holds each step once, decides. At the start of a
    process, the run at Weights & Biases says up to which step it has rows: what it lacks, up to the step that
    training goes on from, is sent from the file; steps that it has already (a resumed run computes them
    again, with the same values) are not sent a second time. After a rollback the run there is rewound, too,
    since the steps behind it get other values. Offline there is nobody to ask: each process writes the whole
    run from its first step, and removes what earlier processes had written of it.
    """

    def __init__(self, cfg: WandbConfig, run_dir: Path | None, run_config: dict[str, Any]):
        self.cfg = cfg
        self.run_dir = run_dir
        self.run_config = run_config
        self._run: wandb.Run | None = None
        self._row = 0
        """The step of the row that is being filled, or of the first that is not there yet."""
        self._evaluated_at = -1
        """The last step whose evaluation is there."""

    def start(self, step: int, total_steps: int | None, resumed: bool) -> None:
        directory = expect_run_dir(self.run_dir, f"log.wandb.mode={self.cfg.mode}")
        mode = _mode(self.cfg.mode)
        run_id = _run_id(directory, keep=resumed)
        superseded = list((directory / "wandb").glob(f"offline-run-*-{run_id}"))
        undone = self._row > step + 1 and mode == "online" and resumed  # a rollback: this logger sent them
        run = self._run = self._rewound(directory, run_id, step) if undone else None
        if run is None:
            run = self._run = self._begin(directory, run_id, mode)
        run.define_metric("evaluation/*", step_metric=_EVALUATED_AT)
        self._row = int(run.step)
        self._evaluated_at = int(dict(run.summary).get(_EVALUATED_AT, -1))
        if resumed:
            self._catch_up(directory, step)
        if mode == "offline":
            for earlier in superseded:
                shutil.rmtree(earlier)
            say(f"wandb: offline; once the run has ended, send it by: wandb sync {Path(run.dir).parent}")

    def log(self, records: list[Record]) -> None:
        for record in records:
            self._log_step(record)

    def log_evaluation(self, record: Record) -> None:
        if self._run is None or record["step"] <= self._evaluated_at:
            return
        self._evaluated_at = record["step"]
        values = {f"evaluation/{name}": value for name, value in numbers_of(record).items()}
        # Where an evaluation comes after a resume, the row of its step may be there and cannot be added to.
        # Evaluations are drawn by their own step, so any later row will do.
        self._run.log(values | {_EVALUATED_AT: record["step"]}, step=max(self._row, record["step"]))

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log_step(self, record: Record) -> None:
        if self._run is None or record["step"] < self._row:
            return
        self._row = record["step"]
        values = {f"train/{name}": value for name, value in numbers_of(record).items()}
        self._run.log(values, step=record["step"])

    def _catch_up(self, directory: Path, step: int) -> None:
        """Send what the files in `directory` hold up to `step` and the run does not."""
        evaluations = {record["step"]: record for record in read_jsonl(directory / EVALUATIONS)}
        steps = {record["step"]: record for record in read_jsonl(directory / STEPS)}
        for number in sorted(number for number in steps.keys() | evaluations.keys() if number <= step):
            if number in steps:
                self._log_step(steps[number])
            if number in evaluations:
                self.log_evaluation(evaluations[number])

    def _begin(self, directory: Path, run_id: str, mode: str) -> "wandb.Run":
        import wandb

        resume = "allow" if mode == "online" else None
        try:
            return self._init(directory, mode=mode, id=run_id, resume=resume)
        except wandb.Error as error:
            raise UserError(
                f"log.wandb.mode={self.cfg.mode}: {first_line(error)}; log in with `wandb login`, "
                "or set log.wandb.mode=offline"
            ) from None

    def _rewound(self, directory: Path, run_id: str, step: int) -> "wandb.Run | None":
        """The run as it was at `step`; None where the server does not rewind."""
        import wandb

        try:
            return self._init(directory, mode="online", resume_from=f"{run_id}?_step={step}")
        except wandb.Error as error:
            say(
                f"wandb: steps {step + 1} to {self._row} were undone, and the server keeps their rows "
                f"({first_line(error)}); {directory / STEPS} has the new ones"
            )
            return None

    def _init(self, directory: Path, **which: Any) -> "wandb.Run":
        import wandb

        return wandb.init(
            project=self.cfg.project,
            entity=self.cfg.entity,
            name=self.cfg.name or directory.resolve().name,
            dir=str(directory),
            config=self.run_config,
            allow_val_change=True,  # a run may go on with another number of steps
            reinit="create_new",
            settings=wandb.Settings(console="off"),
            **which,
        )


def _run_id(directory: Path, keep: bool) -> str:
    """The id in the run directory, or a new one for a run that begins."""
    path = directory / ID_FILE
    if keep and path.exists():
        return str(json.loads(path.read_text())["id"])
    run_id = uuid.uuid4().hex[:12]
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"id": run_id}) + "\n")
    return run_id


def _mode(asked: str) -> str:
    """`asked`, but offline where the server cannot be reached; that is said."""
    if asked == "offline":
        return asked
    import wandb

    url = wandb.setup().settings.base_url
    if (reason := why_unreachable(url)) is None:
        return asked
    say(f"wandb: {urlsplit(url).hostname} cannot be reached ({reason}); this process logs offline")
    return "offline"
