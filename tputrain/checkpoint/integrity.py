"""Whether a checkpoint is whole: a digest of every file, and a digest of the digests.

`checksums.json` names every other file with its size and SHA-256; `COMPLETE`, written last, holds the SHA-256
of `checksums.json`, and the SHA-256 of that line, so that it can be told which of the two is damaged. Each
byte of each file is vouched for, and a directory without `COMPLETE` was never finished. A file that several
ranks wrote has a digest a part: each rank reads only what it wrote.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tputrain.checkpoint.pace import no_rest
from tputrain.checkpoint.tensor_files import Part
from tputrain.checkpoint.unsealed import WRITTEN
from tputrain.errors import UserError

CHECKSUMS = "checksums.json"
COMPLETE = "COMPLETE"
_MARKS = (CHECKSUMS, COMPLETE, WRITTEN)  # the first two where an earlier process came so far
_PIECE = 1 << 20  # bytes: a millisecond of work


class DamagedCheckpointError(Exception):
    """One line that names the file and what is wrong with it."""


class PartDigest(NamedTuple):
    """Bytes of a file, and their SHA-256."""

    offset: int
    num_bytes: int
    sha256: str


PartDigests = Mapping[str, Sequence[PartDigest]]
"""By file: digests of parts that make up the whole of it."""


def seal(directory: Path, rest: Callable[[], None] = no_rest, parts: PartDigests | None = None) -> None:
    """Vouch for every file in `directory` (flat), and force everything to the disk; `rest` is called between
    pieces of that. Where a process was killed at it, another may do it again.

    `parts`: of files that are on the disk, and not to be read again.
    """
    parts = parts or {}
    names = sorted(path.name for path in directory.iterdir() if path.name not in _MARKS)
    for name in names:
        _sync(directory / name)
        rest()
    digests = {
        name: {"bytes": (directory / name).stat().st_size}
        | (
            {"parts": _in_order(directory / name, parts[name])}
            if name in parts
            else {"sha256": _sha256(directory / name, rest)}
        )
        for name in names
    }
    _write_synced(directory / CHECKSUMS, json.dumps(digests, indent=2) + "\n")
    _write_synced(directory / COMPLETE, _vouch_for((directory / CHECKSUMS).read_bytes()))
    _sync(directory)


def verify(directory: Path, only: tuple[str, ...] = ()) -> None:
    """Raise DamagedCheckpointError unless every file (or those named) is, byte for byte, what `seal` saw.

    Only content counts as damage. What keeps a file from being read at all (permissions, a disk or a network
    that does not answer) says nothing about it and may pass: that is a UserError.
    """
    complete, checksums = _read(directory / COMPLETE), _read(directory / CHECKSUMS)
    if complete != _vouch_for(checksums).encode():
        digest = complete.split(b"\n")[0]
        is_itself_whole = complete == digest + b"\n" + hashlib.sha256(digest).hexdigest().encode() + b"\n"
        damaged = CHECKSUMS if is_itself_whole else COMPLETE
        raise DamagedCheckpointError(f"{damaged}: damaged (its checksum differs)")
    for name, expected in json.loads(checksums).items():
        if only and name not in only:
            continue
        with _reading(directory / name):
            found = (directory / name).stat().st_size
            if found != expected["bytes"]:
                raise DamagedCheckpointError(f"{name}: {found} bytes, expected {expected['bytes']}")
            if "parts" not in expected and _sha256(directory / name) != expected["sha256"]:
                raise DamagedCheckpointError(f"{name}: damaged (its checksum differs)")
            for offset, num_bytes, sha256 in expected.get("parts", ()):
                if _sha256(directory / name, part=(offset, num_bytes)) != sha256:
                    raise DamagedCheckpointError(
                        f"{name}: damaged (the checksum of bytes {offset} to {offset + num_bytes} differs)"
                    )


def digests_of(
    directory: Path, parts: Sequence[Part], rest: Callable[[], None] = no_rest
) -> dict[str, list[PartDigest]]:
    """Force files to the disk, and read the parts of them that this process has written."""
    for name in sorted({part.file for part in parts}):
        _sync(directory / name)
        rest()
    digests: dict[str, list[PartDigest]] = {}
    for name, offset, num_bytes in parts:
        digest = _sha256(directory / name, rest, (offset, num_bytes))
        digests.setdefault(name, []).append(PartDigest(offset, num_bytes, digest))
    return digests


def _in_order(path: Path, parts: Sequence[PartDigest]) -> list[PartDigest]:
    """The parts of a file, which must be all of it, each byte once."""
    ordered = sorted(parts)
    ends = [offset + num_bytes for offset, num_bytes, _ in ordered]
    size = path.stat().st_size
    assert [0, *ends] == [*(part.offset for part in ordered), size], f"{path}: {ordered} of {size} bytes"
    return ordered


def sync_directory(directory: Path) -> None:
    """Force the names in `directory` to the disk."""
    _sync(directory)


def _read(path: Path) -> bytes:
    with _reading(path):
        return path.read_bytes()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Tells a file that is not there, which is damage, from one that cannot be read now, which is not."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedCheckpointError(f"{path.name}: missing") from None
    except IsADirectoryError:
        raise DamagedCheckpointError(f"{path.name}: a directory, expected a file") from None
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read now ({error.strerror}); nothing was changed: mend that and try again, "
            f"or move {path.parent} away to go on without it"
        ) from None


def _vouch_for(checksums: bytes) -> str:
    digest = hashlib.sha256(checksums).hexdigest()
    return f"{digest}\n{hashlib.sha256(digest.encode()).hexdigest()}\n"


def _sha256(path: Path, rest: Callable[[], None] = no_rest, part: tuple[int, int] = (0, sys.maxsize)) -> str:
    """Of the file, or of a part of it: where it begins, and how many bytes it has."""
    offset, left = part
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while piece := file.read(min(_PIECE, left)):
            digest.update(piece)
            left -= len(piece)
            rest()
    return digest.hexdigest()


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
