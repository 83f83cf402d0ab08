"""Lines for the person who waits, each of them whole: what starts now, and how long it took."""

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LOGGER = logging.getLogger("tputrain")
"""What is said to people goes through it, at level INFO; `LOGGER.setLevel(logging.WARNING)` silences it."""


class _Terminal(logging.Handler):
    """Prints each line at once to standard output, as it is at that moment, also where that is a pipe."""

    is_open = False
    """Whether `announced` has begun a line, and is to complete it."""

    def emit(self, record: logging.LogRecord) -> None:
        completion = getattr(record, "completion", None)
        if completion is not None and self.is_open:
            self.is_open = False
            self.print(completion, "\n")
        else:
            self.print(record.getMessage(), getattr(record, "end", "\n"))

    def print(self, text: str, end: str) -> None:
        beginning = "\n" if self.is_open else ""
        self.is_open = not end.endswith("\n")
        try:
            print(f"{beginning}{text}", end=end, flush=True)
        except OSError as error:
            # Redirected to a file on a disk that is full: what is said there is not worth a run.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise


_terminal = _Terminal()
LOGGER.addHandler(_terminal)
LOGGER.propagate = False  # a script's own handlers, of the root logger, would say everything twice
if LOGGER.level == logging.NOTSET:
    LOGGER.setLevel(logging.INFO)


def be_quiet() -> None:
    """From here on nothing but `warn` is heard: another rank says the same on the same terminal."""
    LOGGER.addFilter(_of_another_rank)


def _of_another_rank(record: logging.LogRecord) -> bool:
    return False


def say(line: str) -> None:
    """Say one line."""
    LOGGER.info("%s", line)


def warn(line: str) -> None:
    """One line on standard error, from whatever thread.

    Not by print, whose lock may be held by a thread that hangs; and whoever read this may have gone.
    """
    with suppress(OSError):
        os.write(2, f"\n{line}\n".encode())


@contextmanager
def announced(what: str) -> Iterator[None]:
    """`what ...` before, and its duration after, so that a silence always says what it is.

    On a terminal that is one line, completed at the end unless something was said in between. In a file or a
    pipe, and above a progress bar, where nothing can be known of who else writes, it is two.
    """
    LOGGER.info("%s ...", what, extra={"end": " " if _is_terminal() else "\n"})
    started = time.perf_counter()
    try:
        yield
    except BaseException:
        _complete(what, "not finished")
        raise
    _complete(what, f"{time.perf_counter() - started:.1f} s")


def _is_terminal() -> bool:
    """Whether standard output is one that nobody, such as a progress bar, has put something in front of."""
    return sys.stdout.isatty() and sys.stdout in (sys.__stdout__, sys.__stderr__)


def discard_unwritten() -> None:
    """Before the process ends: what standard output has not taken must not make the exit code 120."""
    try:
        sys.stdout.flush()
    except OSError:  # a full disk, or a reader that is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complete(what: str, end: str) -> None:
    LOGGER.info("%s ... %s", what, end, extra={"completion": end})
