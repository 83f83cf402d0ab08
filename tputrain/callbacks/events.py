"""What happened to a run and when, as JSON lines in `events.jsonl`: started, saved, ended."""

import re
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tputrain import device as devices
from tputrain import exact_json
from tputrain.announce import say
from tputrain.callbacks.callback import Callback
from tputrain.config_differences import changed_settings
from tputrain.loggers.jsonl import EVENTS
from tputrain.versions import versions

if TYPE_CHECKING:
    from tputrain.trainer import Trainer

_SECRET = re.compile(r"(?i)-*[\w.-]*(token|key|secret|password)")
"""A name whose value is nobody else's business: a report is made to be shown."""


class EventLog(Callback):
    """Appends to `events.jsonl` in `directory`: one line each time a process starts, saves and ends.

    Every line has `event`, `step` and `time` (seconds since 1970); `started` also has the command line, the
    configuration and what of it is not the default, versions and device of that process. Nothing is ever
    taken back: this is the history of the processes, where `metrics.jsonl` is that of the steps. A process
    that was killed has no `ended`.
    """

    def __init__(self, directory: Path | str):
        self.path = Path(directory) / EVENTS
        self._is_writable = True

    def on_fit_start(self, trainer: "Trainer") -> None:
        environment = {"device": devices.describe(trainer.device), **versions()}
        changed = {key: new for key, (_, new) in changed_settings({}, trainer.cfg).items()}
        self._write(
            "started",
            trainer.step,
            command=_command(),
            config=asdict(trainer.cfg),
            changed=changed,
            environment=environment,
        )

    def on_save(self, trainer: "Trainer", checkpoint: Path) -> None:
        # Written in the background, it may be of an earlier step than the trainer's.
        self._write("saved", int(checkpoint.name.rpartition("-")[2]), checkpoint=checkpoint.name)

    def on_fit_end(self, trainer: "Trainer") -> None:
        is_finished = trainer.cfg.trainer.length.is_reached(trainer)
        self._write("ended", trainer.step, finished=is_finished)

    def _write(self, event: str, step: int, **more: Any) -> None:
        if not self._is_writable:
            return
        line = exact_json.dumps({"event": event, "step": step, "time": round(time.time(), 3), **more})
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            # A history is not worth a run.
            self._is_writable = False
            say(f"note: {self.path} cannot be written ({error.strerror}); events are not recorded from here")


def _command() -> str:
    """The command line of this process, without the directories of what was started."""
    script = Path(sys.argv[0])
    name = script.parent.name if script.name == "__main__.py" else script.name
    shown, is_secret = [name], False
    for argument in sys.argv[1:]:
        key, equals, _ = argument.partition("=")
        shown.append("..." if is_secret else f"{key}=..." if equals and _SECRET.fullmatch(key) else argument)
        is_secret = not equals and argument.startswith("-") and _SECRET.fullmatch(argument) is not None
    return shlex.join(shown)
