"""What every optimizer's `step` does first: run the closure that it was given, with gradients on."""

from collections.abc import Callable
from typing import Any

import torch


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """What `closure` gives; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
