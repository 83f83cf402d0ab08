"""Means over an evaluation, summed on the device and read once."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


class WeightedMeans:
    """Weighted means of named scalars: sums on the device, weights on the host."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self.weight = 0

    def add(self, values: Mapping[str, Tensor], weight: int) -> None:
        """Count scalar tensors, the means of a batch, `weight` times."""
        for name, value in values.items():
            weighted = value.detach().float() * weight
            self._sums[name] = self._sums[name] + weighted if name in self._sums else weighted
        self.weight += weight

    def read(self) -> dict[str, float]:
        """The means: the one read of the device in an evaluation."""
        sums = torch.stack(list(self._sums.values())).tolist()
        return {name: total / self.weight for name, total in zip(self._sums, sums, strict=True)}


def of_text(loss: float, num_labels: int, num_bytes: int) -> dict[str, float]:
    """Perplexity of a mean loss in nats over `num_labels` tokens and, where their bytes are known, bits per
    byte.

    `num_bytes`: of the text that these very labels stand for; 0: not known.
    """
    measures = {"perplexity": math.exp(min(loss, 700.0))}  # e^700 is near the largest float
    if num_bytes > 0:
        measures["bits_per_byte"] = loss / math.log(2.0) * num_labels / num_bytes
    return measures
