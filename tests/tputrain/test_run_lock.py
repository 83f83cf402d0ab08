"""The run directory's lock, also where the file system has none."""

import errno
import fcntl
import os

import pytest

from tputrain import UserError
from tputrain.run_lock import RunLock


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_note_and_a_second_process_is_still_noticed(
    tmp_path, monkeypatch, capsys, number
):
    def flock(file: object, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with RunLock(tmp_path):
        said = capsys.readouterr().out
        assert said.startswith(f"note: the file system of {tmp_path} has no locks ({os.strerror(number)})")
        with pytest.raises(UserError, match=rf"another process \(pid {os.getpid()}\) is training here"):
            RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):  # whoever was here has gone
        pass
