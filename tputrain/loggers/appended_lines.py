"""A file that lines are added to while a run goes on, also where the disk is full for a while."""

import os
from pathlib import Path

from tputrain.announce import warn


class AppendedLines:
    """Adds to the end of the file at `path`. What the disk does not take is kept, and written with what comes
    next: a log is not worth a run.
    """

    def __init__(self, path: Path):
        """Raises OSError where the file cannot be opened."""
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting = b""
        self._is_refused = False
        self._may_lack_some = False  # what a failed sync should have written, the system forgets

    def add(self, text: str) -> None:
        """Write whole lines, or keep them."""
        self._waiting += text.encode("utf-8")
        try:
            while self._waiting:
                # A disk that fills up may take a part: the rest follows, and completes that line.
                self._waiting = self._waiting[os.write(self._descriptor, self._waiting) :]
        except OSError as error:
            self._refused(error)
            return
        if self._is_refused:
            self._is_refused = False
            whole = "what could not be synced may be missing" if self._may_lack_some else "nothing is missing"
            warn(f"{self.path} can be written again, and {whole} in it")
            self._may_lack_some = False

    def sync(self) -> None:
        """Force to the disk what it has taken."""
        self.add("")
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._may_lack_some = True
            self._refused(error)

    def close(self) -> None:
        """Write what is left, and close."""
        self.add("")
        if self._waiting:
            num_lines = self._waiting.count(b"\n")
            warn(f"{self.path}: its last {num_lines} lines could not be written and are lost")
        os.close(self._descriptor)

    def _refused(self, error: OSError) -> None:
        if not self._is_refused:
            self._is_refused = True
            warn(
                f"{self.path} cannot be written ({error.strerror}): training goes on, and its lines are kept "
                "until there is room"
            )
