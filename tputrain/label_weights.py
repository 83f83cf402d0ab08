"""What a batch counts in a mean over several: its labels that the loss compares with something.

A causal model that shifts labels itself, as those of transformers do, does not use the first label of a row.
"""

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
    """The weights of batches. Whether a model shifts is tried where it matters: then its loss is the same, to
    the bit, without the labels of the first column.
    """

    def __init__(self, trainer: "Trainer"):
        self._trainer = trainer
        # The models of this library shift nothing.
        is_ours = trainer.loss_fn is None and hasattr(trainer.model, "gives_logits_with_loss")
        self._shifts: bool | None = False if is_ours else None

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
        without = batch_of.target_of(batch).clone()
        without[:, 0] = IGNORED_LABEL
        try:
            with rng.kept(trainer.device), evaluated(trainer.model, with_logits=False), torch.no_grad():
                with trainer.execution.phase("validate"):
                    losses = [
                        trainer.forward(each)[0].item()
                        for each in (batch, batch_of.with_target(batch, without))
                    ]
        except UserError:  # a model that gives no loss but in training
            return False
        devices.flush(trainer.device)  # the next step's program must not hold any of this
        return losses[0] == losses[1]
