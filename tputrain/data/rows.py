"""Documents that are rows, by way of the `datasets` library: of files, saved directories, the hub."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tputrain.config_checks import nearest
from tputrain.data.config import DataConfig, DataError
from tputrain.data.files import find_files, nearest_path
from tputrain.data.row_place import broken_line, place_of_row
from tputrain.hub import asking_hub, is_path

ANSWERS = "assistant"
"""The role of the messages that are learned."""

_BUILDERS = {"jsonl": "json", "csv": "csv", "parquet": "parquet"}


def open_rows(cfg: DataConfig, held_out: bool = False) -> Any:
    """A `datasets.Dataset` (or, with data.streaming, an `IterableDataset`) that has the columns named in
    `cfg`.

    `held_out`: the one to be judged by, data.validation_files or data.validation_split. Raises DataError, one
    line, for what is not there.
    """
    # Here, not above: it takes a second, which text files need not wait for.
    import datasets

    datasets.disable_progress_bars()
    # It logs what it raises as well, and what is raised becomes our one line.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        dataset = _saved(cfg, held_out) if cfg.source == "saved" else _loaded(cfg, held_out)
        # A stream's columns may only be known from its first row.
        columns = dataset.column_names or list(next(iter(dataset), {}))
    except DataError:
        raise
    except Exception as error:  # what is raised by way of the network and the formats has no common type
        raise _unreadable(cfg, held_out, error) from error
    if not columns or (not cfg.streaming and len(dataset) == 0):
        raise empty(cfg, held_out)
    _check_columns(columns, cfg)
    return dataset


def read_documents(
    rows: Any, cfg: DataConfig, held_out: bool = False, is_from_start: bool = True
) -> Iterator[str | None]:
    """Each row as a document: its text, or its conversation as JSON; None for one that holds nothing.

    `held_out`: as it was given to `open_rows`. `is_from_start`: whether `rows` begin with the first one.
    Raises DataError, one line, at a row that is not what data.format says.
    """
    convert = {"text": _text, "messages": _messages, "prompt": _question}[cfg.format]
    rows = iter(rows)
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # a stream reads its files only now
            raise _unreadable(cfg, held_out, error) from error
        if row is None:
            return
        try:
            text = convert(row, cfg)
        except _MalformedError as error:
            place = _place(cfg, held_out, number) if is_from_start else "a row"
            raise DataError(f"{_where(cfg, held_out)}: {place}, {error}") from None
        yield text
        number += 1


def empty(cfg: DataConfig, held_out: bool = False) -> DataError:
    """What is said where there is no row, or only empty ones."""
    return DataError(f"{_where(cfg, held_out)}: there is no row with text in it")


class _MalformedError(ValueError):
    """What a row has, and what was expected."""


def _place(cfg: DataConfig, held_out: bool, number: int) -> str:
    """Row `number` (from 0), by its file where the user named files."""
    place = place_of_row(_files(cfg, held_out), cfg.source, number) if cfg.source in _BUILDERS else None
    return place or f"row {number + 1}"


def _files(cfg: DataConfig, held_out: bool) -> list[Path]:
    key = "validation_files" if held_out else "files"
    return find_files(str(getattr(cfg, key)), f"data.{key}")


def _where(cfg: DataConfig, held_out: bool) -> str:
    """The key that says where the rows are, and its value."""
    if held_out and cfg.validation_files is not None:
        return f"data.validation_files={cfg.validation_files!r}"
    return "{}={}".format(*cfg.where)


def _loaded(cfg: DataConfig, held_out: bool) -> Any:
    import datasets

    if cfg.source == "hub":
        name, split = str(cfg.name), cfg.validation_split if held_out else cfg.split
        is_here = Path(name).is_dir()
        if not is_here and is_path(name):
            raise _no_directory(cfg)
        with nullcontext() if is_here else asking_hub(f"data.name={name} ({split})"):
            return datasets.load_dataset(name, cfg.subset, split=split, streaming=cfg.streaming)
    files = [str(path) for path in _files(cfg, held_out)]
    return datasets.load_dataset(
        _BUILDERS[cfg.source],
        data_files=files,
        split="train",  # what the library calls files that are not said to be of any split
        streaming=cfg.streaming,
        cache_dir=str(Path(cfg.cache_dir).expanduser() / "datasets"),
    )


def _saved(cfg: DataConfig, held_out: bool) -> Any:
    import datasets

    path = Path(str(cfg.name)).expanduser()
    if not path.is_dir():
        raise _no_directory(cfg)
    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        key = "validation_split" if held_out else "split"
        dataset = dataset[_known(f"data.{key}", getattr(cfg, key), list(dataset), f"split in {cfg.name}")]
    elif held_out:
        raise DataError(f"data.validation_split={cfg.validation_split}: {cfg.name} is one dataset, unsplit")
    return dataset.to_iterable_dataset() if cfg.streaming else dataset


def _no_directory(cfg: DataConfig) -> DataError:
    hint = nearest_path(str(cfg.name))
    suggestion = f"; did you mean {hint}?" if hint else ""
    return DataError(f"data.name={cfg.name!r}: no such directory{suggestion}")


def _check_columns(columns: Sequence[str], cfg: DataConfig) -> None:
    keys = {"text": ["text_column"], "messages": ["messages_column"]}.get(
        cfg.format, ["prompt_column", "answer_column"]
    )
    for key in keys:
        _known(f"data.{key}", getattr(cfg, key), columns, "column in {}={}".format(*cfg.where))


def _known(key: str, name: str, known: Sequence[str], what: str) -> str:
    if name not in known:
        hint = nearest(name, known)
        suggestion = f"; did you mean {hint}?" if hint else ""
        raise DataError(f"{key}={name}: no such {what}, which has {', '.join(known)}{suggestion}")
    return name


def _text(row: dict[str, Any], cfg: DataConfig) -> str | None:
    return _string(row, cfg.text_column) or None


def _question(row: dict[str, Any], cfg: DataConfig) -> str | None:
    question = _string(row, cfg.prompt_column)
    answer = _string(row, cfg.answer_column)
    if not answer:
        return None
    return conversation(question or "", answer)


def _messages(row: dict[str, Any], cfg: DataConfig) -> str | None:
    messages = row[cfg.messages_column]
    if not messages:
        return None
    well_formed = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not well_formed:
        raise _malformed(row, cfg.messages_column, "a list of {role, content}, both text")
    if not any(message["role"] == ANSWERS and message["content"] for message in messages):
        raise _malformed(row, cfg.messages_column, f"a message of role {ANSWERS} to learn")
    return _conversation([{key: message[key] for key in ("role", "content")} for message in messages])


def conversation(question: str, answer: str) -> str:
    """One question and its answer as a document of format=messages: JSON."""
    return _conversation([{"role": "user", "content": question}, {"role": ANSWERS, "content": answer}])


def _conversation(messages: list[dict[str, str]]) -> str:
    return json.dumps(messages, ensure_ascii=False)


def _string(row: dict[str, Any], column: str) -> str | None:
    value = row[column]
    if value is None or isinstance(value, str):
        return value
    raise _malformed(row, column, "text")


def _malformed(row: dict[str, Any], column: str, expected: str) -> _MalformedError:
    value = repr(row[column])
    shown = value if len(value) <= 60 else value[:57] + "..."
    return _MalformedError(f"column {column}: {shown}: expected {expected}")


def _unreadable(cfg: DataConfig, held_out: bool, error: Exception) -> DataError:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, StopIteration):  # of a file without a line
        return empty(cfg, held_out)
    reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0]
    if cfg.source == "jsonl":  # the library names no file, and counts rows from 0 and a block's beginning
        reason = broken_line(_files(cfg, held_out)) or re.sub(r" in row \d+$", "", reason)
    expected = {
        "hub": "a name on the Hugging Face hub (and a network), or a directory with data files",
        "saved": "a directory that datasets.save_to_disk wrote",
    }.get(cfg.source, f"{cfg.source} files with the same columns")
    return DataError(f"{_where(cfg, held_out)}: cannot be read: {reason}; expected {expected}")
