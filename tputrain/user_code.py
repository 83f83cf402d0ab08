"""The line of the user's code that an error comes from."""

import sysconfig
import traceback
from functools import cache
from pathlib import Path

import torch

from tputrain import device as devices

_INSTALLED = ("site-packages", "dist-packages")


def line_of(error: BaseException) -> str | None:
    """`file:line: source` of the innermost frame below whoever caught the error. Frames of PyTorch, tputrain
    and the standard library do not count. None: there is no other.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    users = [each for each in reversed(frames) if is_users(each.filename)]
    own = (each for each in users if not _is_installed(each.filename))
    place = next(own, users[0] if users else None)  # of an error in a library the line that called it
    return None if place is None else f"{place.filename}:{place.lineno}: {place.line}"


def error_summary(error: BaseException) -> str:
    """The error's type and first line, and where it comes from, as part of one line."""
    said = (str(error).strip().splitlines() or ["no message"])[0]
    line = line_of(error)
    return f"{type(error).__name__}: {said}" + ("" if line is None else f" at {line}")


@cache
def is_users(file: str) -> bool:
    """Whether it is of neither PyTorch, tputrain nor the standard library."""
    if file.startswith(("<", *_not_the_users())):
        return False
    return _is_installed(file) or not file.startswith(sysconfig.get_paths()["stdlib"])


def _is_installed(file: str) -> bool:
    return any(f"/{each}/" in file for each in _INSTALLED)


@cache
def _not_the_users() -> tuple[str, ...]:
    directories = (Path(torch.__file__).parent, Path(__file__).parent, devices.source_directory())
    return tuple(f"{each}/" for each in directories)
