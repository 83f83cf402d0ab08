"""The command line with a fault inside.

    python -m tests.acceptance.faulty_process FAULT STEP run RECIPE ...

FAULT is what becomes of step STEP of the training:

    stuck    it never returns: its thread waits in C, as one does for a device that does not answer
    nan      its loss is not a number, as often as it is computed
"""

import ctypes
import sys
from typing import Any

import torch
from torch import Tensor

from tests.tputrain.hanging_run import hang
from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.cli import main
from tputrain.feed import IndexedFeed
from tputrain.models.llama import Llama


def break_step(fault: str, step: int) -> None:
    """Have the model do as `fault` says with the batch of `step` (from 1), whenever it gets it."""
    batches, to_device, forward = IndexedFeed.batches, batch_of.to_device, Llama.forward
    text: Tensor | None = None  # of the batch
    faulty: Tensor | None = None  # the same, where it is trained on

    def noted_batches(self: IndexedFeed, number: int, count: int) -> list[Batch]:
        nonlocal text
        found = batches(self, number, count)
        if number + 1 == step:
            text = found[0]["input_ids"]
        return found

    def noted_to_device(batch: Batch, device: torch.device) -> Batch:
        nonlocal faulty
        moved = to_device(batch, device)
        # Looked at on the host, from where it comes; not a tensor in it.
        is_of_host = isinstance(batch, dict) and batch["input_ids"].device.type == "cpu"
        if is_of_host and text is not None and torch.equal(batch["input_ids"], text):
            faulty = moved["input_ids"]
        return moved

    def faulty_forward(self: Llama, *inputs: Any, **named: Any) -> Any:
        if not self.training or named.get("input_ids") is not faulty:
            return forward(self, *inputs, **named)
        if fault == "stuck":
            hang(ctypes.CDLL(None))
        loss = forward(self, *inputs, **named)
        return (loss - loss) / (loss - loss)

    IndexedFeed.batches = noted_batches
    batch_of.to_device = noted_to_device
    Llama.forward = faulty_forward


if __name__ == "__main__":
    kind, number, *arguments = sys.argv[1:]
    if kind not in ("stuck", "nan"):
        raise SystemExit(f"{kind}: expected stuck or nan")
    break_step(kind, int(number))
    sys.exit(main(arguments))
