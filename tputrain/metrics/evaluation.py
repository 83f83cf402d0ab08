"""Means over an evaluation, summed on the device and read once."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tputrain import batches as batch_of
from tputrain.batches import Batch
from tputrain.errors import UserError

MEASURED = ("step", "loss", "loss_hex", "seconds", "perplexity", "bits_per_byte")
"""What the record of an evaluation holds anyway, so that no metric may have such a name."""


class WeightedMeans:
    """Weighted means of named scalars: sums on the device, weights on the host."""

    def __init__(self, bytes_of: Callable[[Batch], int] | None = None) -> None:
        """`bytes_of`: the bytes of text that a batch's labels stand for, where that is known."""
        self._sums: dict[str, Tensor] = {}
        self._bytes_of = bytes_of
        self._num_bytes = 0
        self._is_text = False
        self.weight = 0

    def count(self, batch: Batch) -> None:
        """Count what is known of a whole batch on the host; its values are added in one or more parts."""
        self._is_text = batch_of.is_text(batch)
        self._num_bytes += self._bytes_of(batch) if self._bytes_of is not None else 0

    def add(self, values: Mapping[str, Tensor], weight: int, of_all: int) -> None:
        """Count scalar tensors, means over this rank's samples, `weight` times; `of_all`: the weights of
        all ranks.
        """
        for name, value in values.items():
            weighted = value.detach().float() * weight
            self._sums[name] = self._sums[name] + weighted if name in self._sums else weighted
        self.weight += of_all

    def read(self, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means: the one read of the device in an evaluation. `total`: the sum over all ranks."""
        sums = total(torch.stack(list(self._sums.values()))).tolist()
        return {name: total / self.weight for name, total in zip(self._sums, sums, strict=True)}

    def result(self, with_perplexity: bool, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """The means and what follows from the loss: of text perplexity and bits per byte; else perplexity
        where it is asked for. Raises UserError where nothing was added.
        """
        if self.weight == 0:
            raise UserError("evaluation: val_loader gave no batch with anything to evaluate")
        means = self.read(total)
        if self._is_text:
            means |= of_text(means["loss"], self.weight, self._num_bytes)
        elif with_perplexity:
            means["perplexity"] = perplexity(means["loss"])
        return means


def metric_value(name: str, value: Any, device: torch.device) -> Tensor:
    """What the metric `name` returned, as a scalar tensor on `device`. Raises UserError: it is no number."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return value.reshape(()).to(device)
    if isinstance(value, int | float | np.integer | np.floating | np.bool_):
        return torch.tensor(float(value), device=device)
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else _described(value)
    raise UserError(
        f"metrics[{name!r}] returned {what}: expected a number or a tensor of one element, the mean over the "
        "batch"
    )


def _described(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"


@contextmanager
def evaluated(model: nn.Module, with_logits: bool) -> Iterator[None]:
    """`model` in its evaluation mode, and as it was afterwards.

    `with_logits`: the models of this library give their logits beside the loss, as metrics want them; where
    nobody does, and in training, logits need not live that long.
    """
    was_training = model.training
    gives_logits = with_logits and hasattr(model, "gives_logits_with_loss")
    model.eval()
    try:
        if gives_logits:
            model.gives_logits_with_loss = True  # type: ignore[assignment]
        yield
    finally:
        model.train(was_training)
        if gives_logits:
            model.gives_logits_with_loss = False  # type: ignore[assignment]


def perplexity(loss: float) -> float:
    """Of a mean loss in nats."""
    return math.exp(min(loss, 700.0))  # e^700 is near the largest float


def evaluation_sets(val_loader: Any) -> dict[str, Iterable[Batch]]:
    """The loaders of a Trainer's `val_loader` by name: the only one has the name ""."""
    if not isinstance(val_loader, Mapping):
        return {} if val_loader is None else {"": val_loader}
    for name in val_loader:
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+", name)):
            raise UserError(f"val_loader: {name!r}: expected a name of letters, digits, '-', '_' and '.'")
    if not val_loader:
        raise UserError("val_loader is an empty mapping: expected a loader by name, or None")
    return dict(val_loader)


def merged(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One record of the results by name of the set: `name/loss` and so on, and as `loss` that of the first.

    The first set is the one that a run is judged by. The result of an only set, named "", is the record.
    """
    if "" in results:
        return dict(results[""])
    first = next(iter(results.values()))
    named = {f"{name}/{key}": value for name, result in results.items() for key, value in result.items()}
    return {"loss": first["loss"]} | named


def of_text(loss: float, num_labels: int, num_bytes: int) -> dict[str, float]:
    """Perplexity of a mean loss in nats over `num_labels` tokens and, where their bytes are known, bits per
    byte.

    `num_bytes`: of the text that these very labels stand for; 0: not known.
    """
    measures = {"perplexity": perplexity(loss)}
    if num_bytes > 0:
        measures["bits_per_byte"] = loss / math.log(2.0) * num_labels / num_bytes
    return measures
