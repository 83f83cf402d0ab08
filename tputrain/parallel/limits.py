"""What runs of several ranks do not take yet, said in one line before anything is built."""

from typing import TYPE_CHECKING

from torch import nn

from tputrain.errors import UserError
from tputrain.models.lora import lora_layers
from tputrain.parallel.world import World

if TYPE_CHECKING:
    from tputrain.config import RunConfig

_FORMS = ("fused", "strict", "debug")


def check_limits(world: World, cfg: "RunConfig", model: nn.Module) -> None:
    """Raise UserError where several ranks would train otherwise than one process does, or not at all."""
    if world.size == 1:
        return
    if cfg.parallel.resolved(world.size)["tensor"] > 1 and any(True for _ in lora_layers(model)):
        raise UserError(
            f"lora.rank: expected 0 with parallel.tensor={cfg.parallel.tensor}: its matrices are not cut "
            "yet; parallel.shard divides them"
        )
    for phase in ("train", "validate", "sample"):
        if (form := getattr(cfg.execution, phase)) not in _FORMS:
            raise UserError(
                f"execution.{phase}={form}: expected {', '.join(_FORMS)} with {world.size} ranks so far"
            )
