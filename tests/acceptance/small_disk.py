"""A disk of a few megabytes that can be filled up, for runs to be put on."""

import errno
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType


class SmallDisk:
    """Context with a file system of its own at `path`, in memory; needs root, or `unshare -rm` around it."""

    def __init__(self, path: Path, num_bytes: int):
        self.path, self.num_bytes = path, num_bytes
        self._ballast = path / "ballast"

    def __enter__(self) -> "SmallDisk":
        self.path.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={self.num_bytes}", "tmpfs", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(
                f"no disk to fill up: {done.stderr.strip()}; run this as root, or after `unshare -rm`"
            )
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        subprocess.run(["umount", str(self.path)], check=True)

    def fill(self, free: int) -> None:
        """Leave `free` bytes of room."""
        with self._ballast.open("ab", buffering=0) as ballast:
            while (room := shutil.disk_usage(self.path).free - free) > 0:
                try:
                    os.write(ballast.fileno(), bytes(min(room, 1 << 20)))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def make_room(self) -> None:
        """Take back what `fill` put there."""
        self._ballast.unlink(missing_ok=True)
