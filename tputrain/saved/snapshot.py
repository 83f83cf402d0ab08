"""A run at one moment, in host memory of its own: it can be written out while training goes on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from tputrain.checkpoint.configuration import write_configuration
from tputrain.checkpoint.rows import Rows
from tputrain.checkpoint.tensor_files import Layout, Part
from tputrain.optim.evaluation_weights import EvaluationWeights
from tputrain.saved import contents


@dataclass(frozen=True)
class Snapshot:
    """All that a checkpoint holds; no tensor shares memory with the model, the optimizer or another."""

    step: int
    model: nn.Module
    """Asked for its configuration files only."""
    tokenizer: Any
    model_tensors: dict[str, Rows]
    trained_tensors: dict[str, Rows]
    """The weights that training goes on with where `model_tensors` are averages of them."""
    optimizer_tensors: dict[str, Rows]
    state: str

    @property
    def num_bytes(self) -> int:
        """What the files will take, but for a few small ones."""
        sizes = (size for layout in self._layouts() for size in layout.num_bytes.values())
        return sum(sizes) + len(self.state)

    def fill(self, directory: Path) -> None:
        """Write the files into an empty directory, from whatever thread."""
        self.create(directory)
        self.write_rows(directory)

    def create(self, directory: Path) -> list[Part]:
        """Make all files, those with tensors in their full size. Returns what is in these: headers."""
        headers = [part for layout in self._layouts() for part in layout.create(directory)]
        write_configuration(self.model, self.tokenizer, directory)
        contents.write_state(self.state, directory)
        return headers

    def write_rows(self, directory: Path) -> list[Part]:
        """Write this rank's rows of all tensors to their places; returns which bytes that were."""
        return [
            part
            for stem, tensors in self._tensors().items()
            for part in contents.write_rows(stem, tensors, directory)
        ]

    def _tensors(self) -> dict[str, dict[str, Rows]]:
        trained = {contents.TRAINED: self.trained_tensors} if self.trained_tensors else {}
        return {contents.MODEL: self.model_tensors, **trained, contents.OPTIMIZER: self.optimizer_tensors}

    def _layouts(self) -> list[Layout]:
        return [contents.layout_of(stem, tensors) for stem, tensors in self._tensors().items()]

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
