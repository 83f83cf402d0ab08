"""Documents that are rows, by way of the `datasets` library: of files, saved directories, the hub."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tputrain.config_checks import did_you_mean, nearest
from tputrain.data.config import DataError, RowsConfig
from tputrain.errors import first_line

ANSWERS = "assistant"
"""The role of the messages that are learned."""


def open_rows(cfg: RowsConfig, held_out: bool = False) -> Any:
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
        dataset = cfg.load(held_out)
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
    rows: Any, cfg: RowsConfig, held_out: bool = False, is_from_start: bool = True
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
            place = "a row"
            if is_from_start:
                place = cfg.row_place(number, held_out) or f"row {number + 1}"
            raise DataError(f"{_where(cfg, held_out)}: {place}, {error}") from None
        yield text
        number += 1


def empty(cfg: RowsConfig, held_out: bool = False) -> DataError:
    """What is said where there is no row, or only empty ones."""
    return DataError(f"{_where(cfg, held_out)}: there is no row with text in it")


class _MalformedError(ValueError):
    """What a row has, and what was expected."""


def _where(cfg: RowsConfig, held_out: bool) -> str:
    """The key that says where the rows are, and its value."""
    return "{}={}".format(*cfg.where(held_out))


def _check_columns(columns: Sequence[str], cfg: RowsConfig) -> None:
    keys = {"text": ["text_column"], "messages": ["messages_column"]}.get(
        cfg.format, ["prompt_column", "answer_column"]
    )
    for key in keys:
        known_name(f"data.{key}", getattr(cfg, key), columns, "column in {}={}".format(*cfg.where()))


def known_name(key: str, name: str, known: Sequence[str], what: str) -> str:
    """`name` where it is one of `known`. Raises DataError, which names a near one, where it is not."""
    if name not in known:
        hint = did_you_mean(nearest(name, known))
        raise DataError(f"{key}={name}: no such {what}, which has {', '.join(known)}{hint}")
    return name


def _text(row: dict[str, Any], cfg: RowsConfig) -> str | None:
    return _string(row, cfg.text_column) or None


def _question(row: dict[str, Any], cfg: RowsConfig) -> str | None:
    question = _string(row, cfg.prompt_column)
    answer = _string(row, cfg.answer_column)
    if not answer:
        return None
    return conversation(question or "", answer)


def _messages(row: dict[str, Any], cfg: RowsConfig) -> str | None:
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


def _unreadable(cfg: RowsConfig, held_out: bool, error: Exception) -> DataError:
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, StopIteration):  # of a file without a line
        return empty(cfg, held_out)
    fault = cfg.fault(held_out, first_line(cause))
    return DataError(f"{_where(cfg, held_out)}: cannot be read: {fault}; expected {cfg.readable}")
