"""What a batch counts in a mean over several: its labels that the loss compares with something.

A causal model that shifts labels itself, as those of transformers do, does not use the first label of a row.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.batches import IGNORED_LABEL, Batch
from tputrain.errors import UserError
from tputrain.metrics.evaluation import evaluated

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


class LabelWeights:
    """The weights of batches. Whether a model that makes its own loss shifts is tried where it matters: then
    it has nothing to compare with where all labels but those of the first column are ignored.
    """

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        # The models of this library shift nothing, and a loss_fn compares what it is given.
        shifts_nothing = trainer.loss_fn is not None or hasattr(trainer.model, "gives_logits_with_loss")
        self._shifts: bool | None = False if shifts_nothing else None

    def of(self, batches: Sequence[Batch]) -> list[int]:
        """One for each batch (on the host) of a mean over all of them. May run the model."""
        plain, shifted = ([batch_of.weight(batch, first) for batch in batches] for first in (0, 1))
        shares_differ = any(a * sum(shifted) != b * sum(plain) for a, b in zip(plain, shifted, strict=True))
        for batch in batches if shares_differ or sum(shifted) == 0 else ():
            if self._shifts is None:
                self._shifts = self._tried(batch)
        return shifted if self._shifts else plain

    def of_one(self, batch: Batch) -> int:
        """That of one batch of many, of which the others are not known yet. May run the model."""
        plain, shifted = batch_of.weight(batch, 0), batch_of.weight(batch, 1)
        if self._shifts is None and plain != shifted:
            self._shifts = self._tried(batch)
        return shifted if self._shifts else plain

    def _tried(self, batch: Batch) -> bool | None:
        """None: this batch does not tell."""
        trainer, num_later = self._trainer, batch_of.weight(batch, 1)
        if not 0 < num_later < batch_of.weight(batch, 0):
            return None
        first_alone = batch_of.target_of(batch).clone()
        first_alone[:, 1:] = IGNORED_LABEL
        try:
            with rng.kept(trainer.device), evaluated(trainer.model, with_logits=False), torch.no_grad():
                with trainer.execution.phase("validate"), trainer.train_step.aside():
                    whole, first = (
                        trainer.train_step.forward(each)[0].item()
                        for each in (batch, batch_of.with_target(batch, first_alone))
                    )
        except (UserError, RuntimeError, IndexError, ValueError):
            return False  # no loss but in training, or one that does not know labels that are ignored
        devices.flush(trainer.device)  # the next step's program must not hold any of this
        if not math.isfinite(whole):
            return None
        return first == 0.0 or math.isnan(first)  # the mean, or the sum, of nothing
