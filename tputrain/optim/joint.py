"""Several optimizers as one: what takes an optimizer, a checkpoint for instance, takes this."""

from collections.abc import Callable
from typing import Any

import torch

from tputrain.optim.closure import evaluated


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers over groups of their own, which step together.

    Its `param_groups` and `state` are those of its `parts`: what is set or loaded here is set there.
    """

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = list(parts)
        kinds = (getattr(part, "kind", type(part).__name__) for part in parts)
        self.kind = f"{type(self).__name__} of {' and '.join(kinds)}"
        """The kind of optimizer that a checkpoint holds the state of: the same parts, in this order."""
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        for part in self.parts:
            self.state.update(part.state)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # `load_state_dict` comes here with new groups and a new state.
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        first = 0
        for part in self.parts:
            num_groups = len(part.param_groups)
            part.param_groups = self.param_groups[first : first + num_groups]
            part.state = self.state
            first += num_groups

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` gives."""
        loss = evaluated(closure)
        for part in self.parts:
            # Without the hooks around `step`: the end of an optimizer's step is where the tpu device ends a
            # program, and there is to be one program for all.
            part.step.__wrapped__(part)  # type: ignore[attr-defined]
        return loss
