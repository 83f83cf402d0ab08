"""How ranks write one checkpoint in the background: they tell each other by files how far they are.

No collective: their threads would come to it in another order than the training does.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

_PATIENCE = 3600.0
"""Seconds that a rank waits for the next word of another one, which may write hundreds of gigabytes."""
_PATIENCE_AT_THE_END = 20.0
"""The same once the main thread has ended: the others may have died, and nobody waits for ever."""
_BEGUN = "begun"
_FAILED = "failed"
_PAUSE = 0.02  # seconds


class Meeting:
    """One write of all ranks. Its directory is removed by the next write, if not before."""

    def __init__(self, directory: Path, rank: int, num_ranks: int):
        self._directory = directory
        self._rank = rank
        self._num_ranks = num_ranks
        self.is_over = threading.Event()
        """Set where nobody waits for what this rank writes any more."""

    def begin(self) -> None:
        """On the first rank: the files are there, in their full size."""
        self._directory.mkdir()
        self._say(_BEGUN, "")

    def wait_for_begin(self) -> None:
        """On the others. Raises OSError where there will be no files."""
        self._wait_for(_BEGUN, 0)

    def say(self, stage: str, what: object = None) -> None:
        """This rank has come to a stage, and has `what` to tell, which JSON can hold."""
        self._say(f"{stage}-{self._rank}", json.dumps(what))

    def of_all(self, stage: str, own: Any = None) -> list[Any]:
        """What each rank tells at a stage, once all have come to it; of this one it is `own`."""
        return [
            own if rank == self._rank else json.loads(self._wait_for(f"{stage}-{rank}", rank))
            for rank in range(self._num_ranks)
        ]

    def say_failed(self, reason: str) -> None:
        """This rank cannot write: the others give up as well."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._say(f"{_FAILED}-{self._rank}", reason)
        except OSError:
            pass  # they notice that nothing comes

    def end(self) -> None:
        """On the first rank: the checkpoint is in place."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def _say(self, name: str, text: str) -> None:
        unfinished = self._directory / f".{name}"
        unfinished.write_text(text, encoding="utf-8")
        os.rename(unfinished, self._directory / name)

    def _wait_for(self, name: str, whom: int) -> str:
        since, ended_at = time.monotonic(), None
        while not (path := self._directory / name).exists():
            for failure in self._directory.glob(f"{_FAILED}-*"):
                rank = failure.name.rpartition("-")[2]
                raise OSError(f"rank {rank}: {failure.read_text(encoding='utf-8')}")
            now = time.monotonic()
            if ended_at is None and not threading.main_thread().is_alive():
                ended_at = now
            if (
                self.is_over.is_set()
                or now - since > _PATIENCE
                or (ended_at is not None and now - ended_at > _PATIENCE_AT_THE_END)
            ):
                raise OSError(f"rank {whom} has not written its part after {now - since:.0f} s")
            time.sleep(_PAUSE)
        return path.read_text(encoding="utf-8")
