"""Files with tensors on a store that keeps no writes of several processes into one file.

A bucket that is mounted (gcsfuse and its like) takes a file as a whole. Of two processes that write into one
file, it keeps what the one wrote that closes it last. So each process writes its rows into a file of its own,
one behind the other. When all are written, each file of the checkpoint is put together by one process, from
the first byte to the last.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

from tputrain.checkpoint.tensor_files import Part

_AT_ONCE = 1 << 23  # bytes in memory


def rows_path(directory: Path, rank: int) -> Path:
    """The file with the rows of a rank."""
    return directory / f".rows-{rank}"


def write_apart(path: Path, placed: Iterable[tuple[Part, memoryview]]) -> list[Part]:
    """Write bytes one behind the other into a new file. Returns, in this order, where they belong.

    Raises OSError where the disk does not take them.
    """
    parts = []
    with path.open("xb", buffering=0) as file:
        for part, data in placed:
            while data:
                data = data[file.write(data) :]
            parts.append(part)
    return parts


def compose(
    directory: Path, file: str, header: bytes, num_bytes: int, parts_of: Sequence[Sequence[Part]]
) -> Part:
    """Put a file of `num_bytes` together. `parts_of`: by rank, where what its file with rows holds belongs.

    Returns the whole of it. Raises OSError where the disk does not take it, or rows are missing.
    """
    pieces = []
    for rank, parts in enumerate(parts_of):
        begin = 0
        for part in parts:
            if part.file == file:
                pieces.append((part.offset, rank, begin, part.num_bytes))
            begin += part.num_bytes
    with ExitStack() as opened:
        rows = {
            rank: opened.enter_context(rows_path(directory, rank).open("rb", buffering=0))
            for rank in sorted({rank for _, rank, _, _ in pieces})
        }
        composed = opened.enter_context((directory / file).open("xb"))
        composed.write(header)
        for offset, rank, begin, left in sorted(pieces):
            if composed.tell() != offset:
                break
            rows[rank].seek(begin)
            while left and (piece := rows[rank].read(min(left, _AT_ONCE))):
                composed.write(piece)
                left -= len(piece)
        if composed.tell() != num_bytes:
            raise OSError(f"{file}: no rank has written what comes after its first {composed.tell()} bytes")
    return Part(file, 0, num_bytes)
