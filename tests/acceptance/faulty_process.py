"""The command line with a fault inside.

    python -m tests.acceptance.faulty_process FAULT STEP run RECIPE ...

FAULT is what becomes of step STEP of the training:

    stuck    it never returns: its thread waits in C, as one does for a device that does not answer
    nan      its loss is not a number, as often as it is computed
"""

import ctypes
import sys
from typing import Any

from tputrain.batches import Batch
from tputrain.cli import main
from tputrain.feed import IndexedFeed
from tputrain.models.llama import Llama


def break_step(fault: str, step: int) -> None:
    """Have training steps ask for their number, and the model do as `fault` says at `step` (from 1)."""
    batches, forward = IndexedFeed.batches, Llama.forward
    at = 0

    def numbered_batches(self: IndexedFeed, number: int, count: int) -> list[Batch]:
        nonlocal at
        at = number + 1
        return batches(self, number, count)

    def faulty_forward(self: Llama, *inputs: Any, **named: Any) -> Any:
        if not self.training or at != step:
            return forward(self, *inputs, **named)
        if fault == "stuck":
            wait_for_ever()
        loss = forward(self, *inputs, **named)
        return (loss - loss) / (loss - loss)

    IndexedFeed.batches = numbered_batches
    Llama.forward = faulty_forward


def wait_for_ever() -> None:
    """Lock a mutex that this very thread holds."""
    library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


if __name__ == "__main__":
    kind, number, *arguments = sys.argv[1:]
    if kind not in ("stuck", "nan"):
        raise SystemExit(f"{kind}: expected stuck or nan")
    break_step(kind, int(number))
    sys.exit(main(arguments))
