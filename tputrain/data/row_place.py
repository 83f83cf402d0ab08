"""Where in the user's files a row stands that cannot be used."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path


def place_of_row(files: Sequence[Path], source: str, number: int) -> str | None:
    """File and line, or row of the file (both from 1), of row `number` (from 0) of all `files` together.

    `source`: jsonl, csv or parquet. None: the files have changed, and there is no such row.
    """
    with suppress(OSError, ValueError, csv.Error):
        for path, unit, place in islice(_places(files, source), number, None):
            return f"{path}, {unit} {place}"
    return None


def broken_line(files: Sequence[Path]) -> str | None:
    """File, line (from 1) and fault of the first line that cannot be a row beside those before it.

    None: there is no such line.
    """
    kinds: dict[str, str] = {}
    for path in files:
        if _is_array(path):
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip() and (fault := _fault(line, kinds)) is not None:
                    return f"{path}, line {number}: {fault}"
    return None


def _fault(line: bytes, kinds: dict[str, str]) -> str | None:
    """What is wrong with a line; `kinds`: by column what it held so far, to which this line's are added."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"no JSON ({error.msg if isinstance(error, json.JSONDecodeError) else error})"
    if not isinstance(row, dict):
        return f"a JSON {_kind(row)}, not an object"
    for column, value in row.items():
        if value is not None and kinds.setdefault(column, _kind(value)) != _kind(value):
            return f"column {column} is a {_kind(value)}, in earlier lines it is a {kinds[column]}"
    return None


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "number", float: "number", list: "list", dict: "object"}
    return names.get(type(value), "null")


def _places(files: Sequence[Path], source: str) -> Iterator[tuple[Path, str, int]]:
    for path in files:
        if source == "jsonl" and not _is_array(path):
            with path.open("rb") as file:
                yield from ((path, "line", number) for number, line in enumerate(file, 1) if line.strip())
        else:
            yield from ((path, "row", number) for number in range(1, _num_rows(path, source) + 1))


def _num_rows(path: Path, source: str) -> int:
    match source:
        case "parquet":
            from pyarrow.parquet import read_metadata  # type: ignore[import-untyped]

            return int(read_metadata(path).num_rows)
        case "csv":
            with path.open(newline="", encoding="utf-8") as file:
                return sum(1 for row in csv.reader(file) if row) - 1  # the names of the columns
        case _:
            return len(json.loads(path.read_bytes()))


def _is_array(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4096).lstrip().startswith(b"[")
