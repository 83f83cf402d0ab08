"""The hooks of callbacks that are called inside a step."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tputrain.callbacks.callback import Callback
from tputrain.errors import UserError
from tputrain.loop.step_parts import StepHooks

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


def step_hooks(callbacks: Sequence[Callback], trainer: "Trainer") -> StepHooks:
    """Those that some callback has. Raises UserError where the step is replayed without its Python."""

    def of(name: str) -> list[Callback]:
        base = getattr(Callback, name)
        found = [each for each in callbacks if getattr(type(each), name) is not base]
        if found and trainer.execution.captures_training:
            raise UserError(
                f"execution.train=captured: {type(found[0]).__name__} has {name}, and a captured step is "
                "replayed without any Python: expected execution.train=fused"
            )
        return found

    return StepHooks(
        tuple(partial(each.on_before_backward, trainer) for each in of("on_before_backward")),
        tuple(partial(each.on_after_backward, trainer) for each in of("on_after_backward")),
        tuple(partial(each.on_before_optimizer_step, trainer) for each in of("on_before_optimizer_step")),
    )
