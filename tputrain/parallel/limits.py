"""What runs of several ranks do not take yet, said in one line before anything is built."""

from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from tputrain.config_checks import spelled
from tputrain.errors import UserError
from tputrain.models.lora import lora_layers
from tputrain.parallel.world import World

if TYPE_CHECKING:
    from tputrain.config import RunConfig

_OPTIMIZERS = ("adamw", "sgd")
_FORMS = ("fused", "strict", "debug")


def check_limits(world: World, cfg: "RunConfig", model: nn.Module, optimizer: Optimizer | None) -> None:
    """Raise UserError where several ranks would train otherwise than one process does, or not at all."""
    if world.size == 1:
        return
    if optimizer is not None:
        raise UserError(
            f"Trainer: an optimizer was given, and {world.size} ranks train parts of its parameters: "
            "expected none; RunConfig(optim=OptimConfig(name='adamw')) builds one on the parts"
        )
    if any(True for _ in lora_layers(model)):
        raise UserError(f"lora.rank: expected 0 with {world.size} ranks; LoRA trains in one process so far")
    optim, execution, policy = cfg.optim, cfg.execution, cfg.trainer.on_nonfinite
    for key, value, fits, expected in (
        ("optim.name", optim.name, optim.name in _OPTIMIZERS, " or ".join(_OPTIMIZERS)),
        ("optim.ema_decay", optim.ema_decay, optim.ema_decay is None, "null"),
        ("optim.master_weights", optim.master_weights, not optim.master_weights, "false"),
        ("execution.train", execution.train, execution.train in _FORMS, ", ".join(_FORMS)),
        ("execution.validate", execution.validate, execution.validate in _FORMS, ", ".join(_FORMS)),
        ("execution.sample", execution.sample, execution.sample in _FORMS, ", ".join(_FORMS)),
        ("trainer.on_nonfinite", policy, policy in ("stop", "continue"), "stop or continue"),
    ):
        if not fits:
            raise UserError(f"{key}={spelled(value)}: expected {expected} with {world.size} ranks so far")
