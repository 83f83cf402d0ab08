"""The values that a model on the meta device begins with, made where no checkpoint has them."""

from collections.abc import Callable

import torch
from torch import nn

from tputrain.announce import announced
from tputrain.optim.master_weights import values_kept_exact


class InitialValues:
    """Given at most once, by `initialize(model)`; None: the model has its values."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        initialize: Callable[[nn.Module], None] | None,
    ):
        self._model, self._optimizer, self._initialize = model, optimizer, initialize

    def give(self) -> None:
        """Make the values, where the model has none yet."""
        if self._initialize is not None:
            with announced("making initial values"):
                with values_kept_exact(self._model, self._optimizer):
                    self._initialize(self._model)
        self.come_from_elsewhere()

    def come_from_elsewhere(self) -> None:
        """A checkpoint gave the model its values."""
        self._initialize = None
