"""How ranks write one checkpoint in the background: they tell each other by files how far they are.

No collective: their threads would come to it in another order than the training does.
"""

import json
import os
import shutil
import threading
import time
from pathlib import Path

from tputrain.checkpoint.integrity import PartDigest

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
        self._others = [each for each in range(num_ranks) if each != rank]
        self.is_over = threading.Event()
        """Set where nobody waits for what this rank writes any more."""

    def begin(self) -> None:
        """On the first rank: the files are there, in their full size."""
        self._directory.mkdir()
        self._say(_BEGUN, "")

    def wait_for_begin(self) -> None:
        """On the others. Raises OSError where there will be no files."""
        self._wait_for(_BEGUN, 0)

    def say_written(self) -> None:
        """This rank's rows are written, and outlive it."""
        self._say(f"written-{self._rank}", "")

    def wait_for_written(self) -> None:
        """On the first rank: until the rows of all are."""
        for rank in self._others:
            self._wait_for(f"written-{rank}", rank)

    def say_digests(self, digests: dict[str, list[PartDigest]]) -> None:
        """This rank's rows are on the disk, and these are their digests."""
        self._say(f"digests-{self._rank}", json.dumps(digests))

    def all_digests(self, parts: dict[str, list[PartDigest]]) -> dict[str, list[PartDigest]]:
        """On the first rank, which has `parts`: those of all ranks, once they are there."""
        found = {name: list(own) for name, own in parts.items()}
        for rank in self._others:
            text = self._wait_for(f"digests-{rank}", rank)
            for name, theirs in json.loads(text).items():
                found.setdefault(name, []).extend(PartDigest(*each) for each in theirs)
        return found

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
