"""A run at one moment, in host memory of its own: it can be written out while training goes on."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tputrain.checkpoint import contents


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds; no tensor shares memory with the model, the optimizer or another."""

    step: int
    model: nn.Module
    """Asked for its configuration files only."""
    tokenizer: Any
    model_tensors: dict[str, Tensor]
    optimizer_tensors: dict[str, Tensor]
    state: str

    @property
    def num_bytes(self) -> int:
        """What the files will take, but for a few small ones."""
        tensors = [*self.model_tensors.values(), *self.optimizer_tensors.values()]
        return sum(tensor.nbytes for tensor in tensors) + len(self.state)

    def fill(self, directory: Path) -> None:
        """Write the files into an empty directory, from whatever thread."""
        contents.write_model(self.model_tensors, self.model, self.tokenizer, directory)
        save_file(self.optimizer_tensors, directory / contents.OPTIMIZER)
        contents.write_state(self.state, directory)


def take_snapshot(
    step: int,
    model: nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    describe: Callable[[dict[str, Any]], dict[str, Any]],
) -> Snapshot:
    """Copy everything to the host, which waits for the device.

    `describe` gets what the optimizer holds beside tensors and returns all of state.json. Raises UserError
    where something cannot be kept in a checkpoint.
    """
    optimizer_tensors, rest = contents.optimizer_contents(optimizer, model)
    return Snapshot(
        step=step,
        model=model,
        tokenizer=tokenizer,
        model_tensors=contents.model_tensors(model),
        optimizer_tensors=optimizer_tensors,
        state=contents.state_text(describe(rest)),
    )
