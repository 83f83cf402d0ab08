"""A run at one moment, in host memory of its own: it can be written out while training goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tputrain.checkpoint import contents
from tputrain.optim.evaluation_weights import EvaluationWeights


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds; no tensor shares memory with the model, the optimizer or another."""

    step: int
    model: nn.Module
    """Asked for its configuration files only."""
    tokenizer: Any
    model_tensors: dict[str, Tensor]
    trained_tensors: dict[str, Tensor]
    """The weights that training goes on with where `model_tensors` are averages of them."""
    optimizer_tensors: dict[str, Tensor]
    state: str

    @property
    def num_bytes(self) -> int:
        """What the files will take, but for a few small ones."""
        groups = (self.model_tensors, self.trained_tensors, self.optimizer_tensors)
        return sum(tensor.nbytes for group in groups for tensor in group.values()) + len(self.state)

    def fill(self, directory: Path) -> None:
        """Write the files into an empty directory, from whatever thread."""
        contents.write_model(self.model_tensors, self.model, self.tokenizer, directory)
        if self.trained_tensors:
            save_file(self.trained_tensors, directory / contents.TRAINED)
        save_file(self.optimizer_tensors, directory / contents.OPTIMIZER)
        contents.write_state(self.state, directory)

    @contextmanager
    def written_in(self, parent: Path) -> Iterator[Path]:
        """A directory with the files, while the context lasts. Raises OSError where there is no room."""
        with TemporaryDirectory(prefix=f".step-{self.step}-", dir=parent) as directory:
            self.fill(Path(directory))
            yield Path(directory)


def take_snapshot(
    step: int,
    model: nn.Module,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    evaluation_weights: EvaluationWeights,
    describe: Callable[[dict[str, Any]], dict[str, Any]],
) -> Snapshot:
    """Copy everything to the host, which waits for the device.

    `describe` gets what the optimizer holds beside tensors and returns all of state.json. Raises UserError
    where something cannot be kept in a checkpoint.
    """
    with evaluation_weights.in_place() as trained:
        model_tensors = contents.model_tensors(model)
        trained_tensors = contents.trained_tensors(model, trained)
    optimizer_tensors, rest = contents.optimizer_contents(optimizer, model)
    return Snapshot(
        step=step,
        model=model,
        tokenizer=tokenizer,
        model_tensors=model_tensors,
        trained_tensors=trained_tensors,
        optimizer_tensors=optimizer_tensors,
        state=contents.state_text(describe(rest)),
    )
