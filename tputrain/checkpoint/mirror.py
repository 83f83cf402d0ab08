"""A copy of a run on other storage, for machines whose own disks go with them."""

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tputrain.announce import announced, say
from tputrain.checkpoint.integrity import COMPLETE, DamagedCheckpointError, verify
from tputrain.errors import UserError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

_LOGS = "*.jsonl"


class Mirror:
    """What is behind a URL that fsspec understands: `gs://bucket/runs/llama`, `s3://...`, `file:///mnt/...`.

    It holds `checkpoints/step-N/` as the run directory does, of the same steps, and the run's JSONL files. A
    checkpoint's mark of completeness is copied last, so that one whose copying was cut short does not count.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.filesystem, self.root = _filesystem_of(self.url)

    def steps(self) -> list[int]:
        """Steps whose checkpoint was copied to its end, newest first."""
        marks = self.filesystem.glob(f"{self.root}/checkpoints/step-*/{COMPLETE}")
        return sorted((int(mark.split("/")[-2].removeprefix("step-")) for mark in marks), reverse=True)

    def push(self, checkpoint: Path, kept: Collection[int]) -> str | None:
        """Copy `run_dir/checkpoints/step-N` and the run's logs there, and remove what is not of steps `kept`.

        Returns what went wrong, in one line; None: nothing. What was there before is removed last.
        """
        try:
            there = f"{self.root}/checkpoints/{checkpoint.name}"
            if self.filesystem.exists(there):
                self.filesystem.rm(there, recursive=True)
            self.filesystem.makedirs(there, exist_ok=True)
            files = sorted(checkpoint.iterdir(), key=lambda file: file.name == COMPLETE)
            for log in checkpoint.parents[1].glob(_LOGS):
                self.filesystem.put_file(str(log), f"{self.root}/{log.name}")
            for file in files:
                self.filesystem.put_file(str(file), f"{there}/{file.name}")
            for step in self.steps():
                if step not in kept:
                    self.filesystem.rm(f"{self.root}/checkpoints/step-{step}", recursive=True)
        except Exception as error:  # every file system has exceptions of its own
            return f"{type(error).__name__}: {' '.join(str(error).split())}"
        return None

    def fetch(self, run_dir: Path) -> None:
        """Bring the newest whole checkpoint and the logs into a run directory that has none.

        Raises UserError where the storage cannot be read: beginning anew is not what was asked for.
        """
        try:
            for step in self.steps():
                if self._fetch_step(step, run_dir):
                    for log in self.filesystem.glob(f"{self.root}/{_LOGS}"):
                        self.filesystem.get_file(log, str(run_dir / log.split("/")[-1]))
                    return
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"checkpoint.mirror={self.url} cannot be read ({type(error).__name__}: {error}): mend that, "
                "or set checkpoint.mirror=null to begin anew"
            ) from None

    def _fetch_step(self, step: int, run_dir: Path) -> bool:
        there, here = f"{self.root}/checkpoints/step-{step}", run_dir / "checkpoints" / f"step-{step}"
        unfinished = here.with_name(f".unfinished-{here.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        with announced(f"fetching checkpoint step-{step} from {self.url}"):
            for file in self.filesystem.ls(there, detail=False):
                self.filesystem.get_file(file, str(unfinished / file.split("/")[-1]))
        try:
            verify(unfinished)
        except DamagedCheckpointError as error:
            say(f"checkpoint {self.url}/checkpoints/step-{step} refused: {error}")
            shutil.rmtree(unfinished)
            return False
        unfinished.rename(here)
        return True


def _filesystem_of(url: str) -> "tuple[AbstractFileSystem, str]":
    import fsspec

    try:
        filesystem, root = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"checkpoint.mirror={url}: {' '.join(str(error).split())}") from None
    return filesystem, root.rstrip("/")
