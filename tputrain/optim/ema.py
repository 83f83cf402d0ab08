"""An exponential moving average of the weights, on their device, updated in the step's own program."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import local_part


class Ema:
    """Averages of `parameters`, which follow them at every step of `optimizer`.

    The decay grows to `decay` as (1 + step) / (10 + step), so that a short run's average is not its start.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, decay: float):
        self.parameters = list(parameters)
        self.averages: list[Tensor] = []
        self.decay = decay
        self.step = 0
        # Inside `optimizer.step()` and not after it: there the tpu device ends the step's program.
        optimizer.register_step_post_hook(lambda *_: self._follow())

    @torch.no_grad()
    def begin(self, step: int) -> None:
        """Take the parameters as they are now for the averages after `step` steps."""
        self.averages = [parameter.detach().clone() for parameter in self.parameters]
        # A clone has the weight's memory until one of them is written, and a step that reads one buffer twice
        # is another program than the steps after it.
        torch._foreach_mul_([local_part(each) for each in self.averages], 1.0)
        self.step = step

    @torch.no_grad()
    def _follow(self) -> None:
        if not self.averages:
            return  # a step outside a run
        decay = min(self.decay, (1 + self.step) / (10 + self.step))
        averages, parameters = ([local_part(each) for each in of] for of in (self.averages, self.parameters))
        torch._foreach_lerp_(averages, parameters, 1.0 - decay)
        self.step += 1
