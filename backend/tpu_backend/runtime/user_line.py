"""Which line of the user's program is running: what an error points at."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

_NOT_THE_USERS = (str(Path(__file__).resolve().parent.parent), str(Path(torch.__file__).parent), "<frozen")


def user_line() -> str:
    """The innermost Python line on this thread that is neither ours nor PyTorch's."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "a line of backward() (torch.autograd.set_detect_anomaly(True) shows the forward line)"
