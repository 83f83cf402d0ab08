"""What runs of several ranks do not take yet, said in one line before anything is built."""

import inspect
from typing import TYPE_CHECKING

from torch import nn

from tputrain.errors import UserError
from tputrain.execution import ExecutionConfig
from tputrain.loss import LossFunction
from tputrain.parallel.world import World

if TYPE_CHECKING:
    from tputrain.config import RunConfig

_FORMS = ("fused", "strict", "debug")
_PHASES = ("train", "validate", "sample")
_MIXERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers of transformers


def check_limits(world: World, cfg: "RunConfig", model: nn.Module, loss_fn: LossFunction | None) -> None:
    """Raise UserError where several ranks would train otherwise than one process does, or not at all."""
    if world.size == 1:
        return
    check_takes_parts(world.context_size, model, loss_fn)
    check_forms(cfg.execution, world.size, world.context_size > 1 or world.tensor_size > 1)


def check_forms(execution: ExecutionConfig, num_ranks: int, divides_more: bool = False) -> None:
    """Raise UserError for a form of steps that so many ranks do not take. `divides_more`: by context or
    tensor parallelism, too.
    """
    if num_ranks == 1:
        return
    forms = _FORMS if divides_more else (*_FORMS, "compile")
    who = "parallel.context or parallel.tensor" if divides_more else f"{num_ranks} ranks"
    for phase in _PHASES:
        if (form := getattr(execution, phase)) not in forms:
            raise UserError(f"execution.{phase}={form}: expected {', '.join(forms)} with {who} so far")


def undividing_phases(execution: ExecutionConfig) -> list[str]:
    """Those whose form of steps context and tensor parallelism do not take."""
    return [phase for phase in _PHASES if getattr(execution, phase) not in _FORMS]


def check_takes_parts(context: int, model: nn.Module, loss_fn: LossFunction | None = None) -> None:
    """Raise UserError unless a part of a sequence has, in this model, the loss that it has in the whole.

    `context`: ranks that share a sequence.
    """
    if context > 1 and (reason := why_no_parts(model, loss_fn)) is not None:
        raise UserError(f"parallel.context={context}: {type(model).__name__} {reason}")


def why_no_parts(model: nn.Module, loss_fn: LossFunction | None = None) -> str | None:
    """The reason why ranks cannot share sequences of this model, as what follows its name in a sentence.

    None: no reason is known.
    """
    if loss_fn is None and not hasattr(model, "gives_logits_with_loss"):
        return (
            "may shift labels itself, and a rank has not the label after its last token: expected our "
            "Llama, a model of transformers, or, in Python, a loss_fn of labels that are shifted already"
        )
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        return (
            "does not take position_ids: expected forward(input_ids, position_ids, ...), as the first "
            "token of a rank need not be that of a sequence"
        )
    config = getattr(model, "config", None)  # of transformers
    kinds = [each for each in getattr(config, "layer_types", None) or () if each not in _ATTENTION]
    kinds += [
        f"{name} ({type(each).__name__})" for name, each in model.named_modules() if isinstance(each, _MIXERS)
    ]
    if kinds:
        return (
            f"has {kinds[0]}, which sees only the part of a sequence that a rank has: expected a model "
            "whose tokens meet in attention alone"
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention not in (None, "sdpa"):
        return (
            f"has the attention {attention}, which sees only the part of a sequence that a rank has: "
            "expected a model of transformers with the attention sdpa"
        )
    for name, module in model.named_modules():
        if (setting := _depends_on_length(module)) is not None:
            return (
                f"has {name} with {setting}, which takes the part of a sequence that a rank has for the "
                "whole: expected another rope_type, or no such setting"
            )
    return None


def _depends_on_length(module: nn.Module) -> str | None:
    """The setting by which a module of transformers makes positions depend on how many tokens a rank has."""
    kinds = getattr(module, "rope_type", None)
    for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            return f"rope_type={kind}"  # its frequencies follow from the largest position of a batch
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", False):
        return "attn_temperature_tuning"  # Llama 4 counts a rank's tokens from 0
    return None
