"""Compiled programs on disk, so that the next process need not compile them: files, and no idea of XLA.

One file a program, named after its key (`runtime/program_key.py`): a line that names the format, a SHA-256 of
all that follows, a JSON header, and XLA's own bytes. Files appear whole or not at all (written beside and
renamed), so processes and hosts may share a directory without locks; whatever is not as it was written is
taken for missing, and removed. Loading an executable runs what is in it, so a directory is used only where
nobody but its user, and root, can write to it or put another one in its place (`untrusted`).
"""

from __future__ import annotations

import errno
import grp
import hashlib
import json
import logging
import os
import pwd
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

NONE = "none"
DEFAULT = "~/.cache/tputrain/executables"
MAX_BYTES = 4 * 2**30

_FORMAT = b"tputrain executable 1\n"
_SUFFIX = ".executable"
_UNFINISHED = ".unfinished"  # of a writer that is at work, or was killed
_LOOKS = 64  # times that the room is counted while a full directory's worth is written
_UNFINISHED_FOR = 3600.0  # seconds, after which its writer is taken for dead
_MOST_LINKS = 40  # on the way to a directory, as in Linux

log = logging.getLogger("tpu_backend.compile")


class ExecutableCache:
    """The programs in `directory`, at most about `max_bytes` of them; those used least recently go first.

    The directory is made at the first write, for its owner alone. Nothing here raises for what is wrong with
    files: what cannot be read is missing, what cannot be written is left, with one line on standard error.
    """

    def __init__(self, directory: str | Path, max_bytes: int = MAX_BYTES):
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: expected 1 or more bytes for the executable cache")
        self.directory = Path(directory).expanduser().absolute()
        self.max_bytes = max_bytes
        self._writes = True
        self._unseen: int | None = None  # bytes written since the room was counted; None: it never was
        self._is_trusted: bool | None = None  # not known: it was not there when it was looked for

    def read(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Header and payload of a program; None where there is none that is whole."""
        path = self._path(key)
        if not self._trusted():
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("executable cache: %s cannot be read (%s): compiling", path, error.strerror)
            return None
        try:
            header, payload = _unpacked(content)
            if header["key"] != key:
                raise ValueError("it is another program's")
        except (ValueError, KeyError) as error:
            self.discard(key, str(error))
            return None
        with suppress(OSError):  # in a directory that is only read nothing is removed either
            os.utime(path)
        return header, payload

    def write(self, key: str, header: dict[str, Any], payload: bytes) -> None:
        """Keep a program. `header` is anything that JSON can hold."""
        if not self._writes or (not self._trusted() and self._is_trusted is False):
            return
        content = _packed({"key": key} | header, payload)
        if len(content) > self.max_bytes:
            log.warning(
                "executable cache: a program of %d bytes is not kept: there is room for %d",
                len(content),
                self.max_bytes,
            )
            return
        unfinished = self.directory / f"{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            make_private(self.directory)
            if not self._trusted():  # somebody else may have been faster
                return
            try:
                unfinished.touch(mode=0o600)
                unfinished.write_bytes(content)
                os.replace(unfinished, self._path(key))
            except BaseException:
                unfinished.unlink(missing_ok=True)
                raise
            self._make_room(len(content))
        except OSError as error:
            self._writes = False
            _warn(
                f"{self.directory} cannot be written ({error.strerror}): "
                "programs compiled from here on are not kept; make it writable or name another directory"
            )

    def discard(self, key: str, why: str) -> None:
        """Remove a program that turned out to be unusable."""
        log.warning("executable cache: %s is not used: %s; compiling", self._path(key), why)
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _trusted(self) -> bool:
        """Whether it is there, and nobody else could have put a program into it."""
        if self._is_trusted is None:
            is_there, problem = _looked_at(self.directory)
            if problem is not None:
                _warn(f"{self.directory} is not used, since programs in it would be run: {problem}")
                self._is_trusted = False
            elif is_there:
                self._is_trusted = True
        return self._is_trusted is True

    def _make_room(self, written: int) -> None:
        """Look at all files now and then only: there may be thousands, and small programs come fast."""
        if self._unseen is not None and self._unseen + written <= self.max_bytes // _LOOKS:
            self._unseen += written
            return
        self._remove_oldest()
        self._unseen = 0

    def _remove_oldest(self) -> None:
        entries = sorted(self._entries())
        total = sum(size for _, size, _ in entries)
        for _, size, path in entries:
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _entries(self) -> Iterator[tuple[float, int, Path]]:
        """When each program was used last, its bytes and its file; what killed writers left is removed."""
        for entry in os.scandir(self.directory):
            with suppress(FileNotFoundError):  # another process was faster
                found = entry.stat()
                if entry.name.endswith(_SUFFIX):
                    yield found.st_mtime, found.st_size, Path(entry.path)
                elif entry.name.endswith(_UNFINISHED) and found.st_mtime < time.time() - _UNFINISHED_FOR:
                    os.unlink(entry.path)


def make_private(directory: Path) -> None:
    """Make a directory, and those above it that are missing, for their owner alone, whatever the umask."""
    for missing in reversed([each for each in (directory, *directory.parents) if not each.exists()]):
        with suppress(FileExistsError):  # another process was faster
            missing.mkdir(mode=0o700)
    if not directory.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))


def untrusted(directory: Path) -> str | None:
    """Why programs found in a directory must not be run, and what to do; None where all is well."""
    return _looked_at(directory)[1]


def _looked_at(directory: Path) -> tuple[bool, str | None]:
    """Whether a directory is there, and why programs in it must not be run.

    The directory must be this user's, and each one on the way to it this user's or root's. None of them may
    be written by others, but that those above it may be sticky, as /tmp is. The same holds for root. What
    does not exist yet is well: whoever makes it owns it.
    """
    here, left = Path("/"), list(reversed(directory.absolute().parts[1:]))
    num_links = 0
    while True:
        try:
            found = here.lstat()
            is_link = stat.S_ISLNK(found.st_mode)
            if (problem := _weakness(here, found, is_last=not left and not is_link)) is not None:
                return True, problem
            if is_link:
                left += reversed(here.readlink().parts)
                here = here.parent
                num_links += 1
        except OSError:
            return False, None  # it is missing, or nobody finds anything there
        if num_links > _MOST_LINKS:
            return False, None
        if left:
            name = left.pop()
            here = here.parent if name == ".." else here / name  # an absolute target begins with "/"
        elif not is_link:
            return True, None


def _weakness(path: Path, found: os.stat_result, is_last: bool) -> str | None:
    """How somebody else could change what is at this path, and what to do about it."""
    user = os.geteuid()
    if found.st_uid != user and (is_last or found.st_uid != 0):
        whose = "root" if found.st_uid == 0 else f"user {found.st_uid}"
        return f"{path} belongs to {whose}, and this is user {user}; name a directory of your own"
    is_sticky = bool(found.st_mode & stat.S_ISVTX) and not is_last
    if stat.S_ISLNK(found.st_mode) or is_sticky:
        return None
    if found.st_mode & stat.S_IWOTH:
        who = "everybody"
    elif found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid, found.st_uid):
        who = f"its group, number {found.st_gid}"
    else:
        return None
    return f"{path} can be written by {who}; chmod go-w {path}, or name another directory"


def _is_private_group(group: int, user: int) -> bool:
    """Whether nobody but this user is in a group: the one of the user's own name, where the umask is 002."""
    try:
        entry, owner = grp.getgrgid(group), pwd.getpwuid(user)
    except KeyError:
        return False
    return owner.pw_gid == group and entry.gr_name == owner.pw_name and set(entry.gr_mem) <= {owner.pw_name}


def _packed(header: dict[str, Any], payload: bytes) -> bytes:
    text = json.dumps(header, sort_keys=True).encode()
    body = len(text).to_bytes(8, "little") + text + payload
    return _FORMAT + hashlib.sha256(body).digest() + body


def _unpacked(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Raises ValueError where the content is not what was written."""
    if not content.startswith(_FORMAT):
        raise ValueError("it is not an executable in this format")
    start = len(_FORMAT) + hashlib.sha256().digest_size
    body = memoryview(content)[start:]
    if hashlib.sha256(body).digest() != content[len(_FORMAT) : start]:
        raise ValueError("it is damaged (its checksum does not hold)")
    end = 8 + int.from_bytes(body[:8], "little")
    return json.loads(bytes(body[8:end])), bytes(body[end:])


def _warn(line: str) -> None:
    print(f"tpu: executable cache: {line}", file=sys.stderr, flush=True)


_current: ExecutableCache | None = None


def current() -> ExecutableCache | None:
    """The one in use; None: programs live as long as their process."""
    return _current


def use(directory: str | Path | None, max_bytes: int = MAX_BYTES) -> None:
    """Choose it for the programs that are needed from now on; None: none."""
    global _current
    _current = None if directory is None else ExecutableCache(directory, max_bytes)


def use_environment() -> None:
    """As ``TPU_CACHE_DIR`` says: a directory; ``none`` or empty: none; unset: `DEFAULT`, or none where this
    user has no home.
    """
    named = os.environ.get("TPU_CACHE_DIR", DEFAULT)
    with suppress(RuntimeError):  # of pathlib, which finds no home
        use(None if named in (NONE, "") else named)
        return
    use(None)
