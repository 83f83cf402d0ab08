"""Which line of the user's program is running: what an error points at."""

from __future__ import annotations

import linecache
import traceback
from pathlib import Path
from types import CodeType

import torch

NOT_THE_USERS = (str(Path(__file__).resolve().parent.parent), str(Path(torch.__file__).parent), "<frozen")


UNKNOWN = "a line of backward() (torch.autograd.set_detect_anomaly(True) shows the forward line)"


def user_line() -> str:
    """The innermost Python line on this thread that is neither ours nor PyTorch's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return UNKNOWN


def line_of(code: CodeType | None, lasti: int) -> str:
    """The line of an instruction, as the recorder keeps it: its code and the offset in it, in bytes."""
    if code is None:
        return UNKNOWN
    number = next((line for start, end, line in code.co_lines() if start <= lasti < end), None)
    number = number or code.co_firstlineno
    return f"{code.co_filename}:{number}: {linecache.getline(code.co_filename, number).strip()}"
