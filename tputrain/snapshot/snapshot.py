"""A run at one moment, in host memory of its own: it can be written out while training goes on."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from tputrain.checkpoint.composed import compose, rows_path, write_apart
from tputrain.checkpoint.configuration import write_configuration
from tputrain.checkpoint.rows import Rows
from tputrain.checkpoint.tensor_files import Layout, Part
from tputrain.optim.evaluation_weights import EvaluationWeights
from tputrain.snapshot import contents


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
        sizes = (size for _, layout in self._layouts() for size in layout.num_bytes.values())
        return sum(sizes) + len(self.state)

    def fill(self, directory: Path) -> None:
        """Write the files into an empty directory, from whatever thread."""
        self.create(directory)
        self.write_rows(directory)

    def create(self, directory: Path) -> list[Part]:
        """Make all files, those with tensors in their full size. Returns what is in these: headers."""
        self._describe(directory)
        return [part for _, layout in self._layouts() for part in layout.create(directory)]

    def create_without_tensors(self, directory: Path) -> None:
        """Make the files that hold no tensors."""
        self._describe(directory)
        for _, layout in self._layouts():
            layout.write_index(directory)

    def _describe(self, directory: Path) -> None:
        write_configuration(self.model, self.tokenizer, directory)
        contents.write_state(self.state, directory)

    def write_rows(self, directory: Path) -> list[Part]:
        """Write this rank's rows of all tensors to their places; returns which bytes that were."""
        return [
            part
            for tensors, layout in self._layouts()
            for part in layout.write(directory, contents.own_rows(tensors))
        ]

    def write_rows_apart(self, directory: Path, rank: int) -> list[Part]:
        """Write this rank's rows of all tensors into a file of its own; returns where they belong."""
        placed = (
            each for tensors, layout in self._layouts() for each in layout.placed(contents.own_rows(tensors))
        )
        return write_apart(rows_path(directory, rank), placed)

    def compose(self, directory: Path, parts_of: Sequence[Sequence[Part]], rank: int) -> list[Part]:
        """Put this rank's share of the files with tensors together, out of the rows of all ranks; returns the
        files.
        """
        files = [
            (file, header, layout.num_bytes[file])
            for _, layout in self._layouts()
            for file, header in layout.headers.items()
        ]
        mine = files[rank :: len(parts_of)]
        return [compose(directory, *each, parts_of) for each in mine]

    def _layouts(self) -> list[tuple[dict[str, Rows], Layout]]:
        """The tensors of each stem, and how they lie in its files."""
        trained = {contents.TRAINED: self.trained_tensors} if self.trained_tensors else {}
        tensors = {contents.MODEL: self.model_tensors, **trained, contents.OPTIMIZER: self.optimizer_tensors}
        return [(tensors[stem], contents.layout_of(stem, tensors[stem])) for stem in tensors]

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
