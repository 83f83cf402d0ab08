"""Errors of one line: a mistake that the user can mend, or a failure of what a run needs."""

import re

_LONGEST = 900  # characters
_NUMBER = re.compile(r"^\[Errno -?\d+\] | \(os error \d+\)")  # as Python, and as Rust writes it


class _OneLineError(Exception):
    """It stays one line, of a length that can be read, whatever the value is that it quotes."""

    def __init__(self, message: str):
        line = " ".join(part.strip() for part in message.splitlines())
        # What was wrong stands at the beginning, what to do at the end.
        super().__init__(line if len(line) <= _LONGEST else f"{line[:600]} ... {line[-250:]}")


class UserError(_OneLineError):
    """A mistake of the user: one line that says what was wrong, where, what was expected and what to do.
    A command ends with exit code 2.
    """


class RunFailedError(_OneLineError):
    """What a run needs failed it, such as a disk that filled up: one line that says what, where and what to
    do. A command ends with exit code 1.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory left. Asked without importing PyTorch."""
    is_named_so = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_named_so or "can't allocate memory" in str(error)  # PyTorch's allocator of the CPU


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def in_words(error: Exception) -> str:
    """What the system, or a library, said of a file: `No space left on device`, without the number."""
    said = error.strerror if isinstance(error, OSError) else None
    return " ".join(_NUMBER.sub("", said or str(error)).split()) or type(error).__name__
