"""Which line of the user's program is running: what an error points at."""

from __future__ import annotations

import linecache
import re
import sys
import traceback
from pathlib import Path
from types import CodeType, FrameType

import torch

NOT_THE_USERS = (
    str(Path(__file__).resolve().parent.parent),
    str(Path(torch.__file__).parent),
    "<frozen",
    "<eval_with_key>",
)


UNKNOWN = "a line of backward() (torch.autograd.set_detect_anomaly(True) shows the forward line)"


def user_line() -> str:
    """The innermost Python line on this thread that is neither ours nor PyTorch's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return UNKNOWN


def innermost_user_line(trace: str) -> str | None:
    """The same, of a stack trace as text."""
    frames = re.findall(r'^\s*File "(.+)", line (\d+), in .*\n(.*)', trace, re.MULTILINE)
    for file, number, text in reversed(frames):
        if not file.startswith(NOT_THE_USERS):
            return f"{file}:{number}: {text.strip()}"
    return None


_first_places: dict[int, tuple[CodeType | None, int]] = {}  # by signature


_place_of_mode: tuple[CodeType | None, int] = (None, 0)


def _place() -> tuple[CodeType | None, int]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def remember_first_line(number: int) -> None:
    """Keep the line that is running as the one where a signature was first met."""
    _first_places[number] = _place()


def share_first_line(number: int, other: int) -> None:
    """A signature that was made of another one was met where that one was."""
    if other in _first_places:
        _first_places[number] = _first_places[other]


def remember_line_of_mode() -> None:
    """Keep the line that is running as the one that changed the eager mode."""
    global _place_of_mode
    _place_of_mode = _place()


def line_of_mode() -> str:
    """Where the eager mode was changed last."""
    return line_of(*_place_of_mode)


def first_line(number: int) -> str:
    """Where a signature was first met."""
    return line_of(*_first_places.get(number, (None, 0)))


def line_of(code: CodeType | None, lasti: int) -> str:
    """The line of an instruction, as the recorder keeps it: its code and the offset in it, in bytes."""
    if code is None:
        return UNKNOWN
    number = next((line for start, end, line in code.co_lines() if start <= lasti < end), None)
    number = number or code.co_firstlineno
    return f"{code.co_filename}:{number}: {linecache.getline(code.co_filename, number).strip()}"
