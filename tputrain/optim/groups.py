"""Which parameters train, and with which weight decay and share of the learning rate: by their names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from tputrain.config_checks import Settings, expect, expect_at_least, nearest
from tputrain.errors import UserError


@dataclass(frozen=True)
class GroupConfig(Settings):
    """Settings for the parameters whose names match a pattern; what it leaves out stays as it was."""

    match: str = ""
    """A shell pattern over whole parameter names: `*.bias`, `model.layers.[01].*`."""
    weight_decay: float | None = None
    """Instead of optim.weight_decay, also where norms and biases would have none; None: as without this."""
    lr_scale: float | None = None
    """What the learning rate is multiplied by; None: as without this."""

    def __post_init__(self) -> None:
        expect(
            bool(self.match), "optim.groups.match", repr(self.match), "a pattern of parameter names: *.bias"
        )
        expect_at_least("optim.groups.weight_decay", self.weight_decay, 0.0)
        expect_at_least("optim.groups.lr_scale", self.lr_scale, 0.0)


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    groups: Sequence[GroupConfig] = (),
    frozen: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """torch.optim's parameter groups over the trainable parameters of `model`.

    Norms, biases and whatever else has one dimension do not decay; then `groups` apply in order, later ones
    over earlier ones. Parameters with the same settings are one group, those that decay by default first.
    A group's `lr_scale` is for `set_learning_rate`. `frozen`: the patterns that `freeze` was given. Raises
    UserError for a pattern that matches nothing, and where nothing is trainable.
    """
    names = [name for name, _ in model.named_parameters()]
    for group in groups:
        expect_match("optim.groups.match", group.match, names)
    in_norms = _parameters_in_norms(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise UserError(f"the model has no parameter to train: {_why_none(names, frozen)}")
    members: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for decays in (True, False):
        for name, parameter in trainable:
            if decays == (parameter.dim() >= 2 and id(parameter) not in in_norms):
                decay, scale = _settings(name, weight_decay if decays else 0.0, groups)
                members.setdefault((decays, decay, scale), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": decay} | ({} if scale == 1.0 else {"lr_scale": scale})
        for (_, decay, scale), parameters in members.items()
    ]


def _why_none(names: Sequence[str], frozen: Sequence[str]) -> str:
    if not names:
        return "it has none at all"
    by_itself = [name for name in names if not matches(name, frozen)]
    if not by_itself:
        return "all are frozen (optim.freeze)"
    return (
        f"{'all' if len(by_itself) == len(names) else 'those that optim.freeze leaves'} have "
        f"requires_grad=False, such as {by_itself[0]}; call requires_grad_(True) on what is to train"
    )


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Take the parameters whose names match one of `patterns` out of training, for good.

    Raises UserError for a pattern that matches nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        expect_match("optim.freeze", pattern, names)
    for name, parameter in model.named_parameters():
        if matches(name, patterns):
            parameter.requires_grad_(False)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the whole of `name` is what one of the shell patterns describes."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def expect_match(key: str, pattern: str, names: Sequence[str]) -> None:
    """Raise UserError unless `pattern` matches one of `names`."""
    hint = nearest(pattern, names) or (names[0] if names else "none")
    is_found = any(fnmatchcase(name, pattern) for name in names)
    expect(is_found, key, pattern, f"a pattern of names in the model, such as {hint}")


def _settings(name: str, weight_decay: float, groups: Sequence[GroupConfig]) -> tuple[float, float]:
    lr_scale = 1.0
    for group in groups:
        if fnmatchcase(name, group.match):
            weight_decay = weight_decay if group.weight_decay is None else group.weight_decay
            lr_scale = lr_scale if group.lr_scale is None else group.lr_scale
    return weight_decay, lr_scale


def _parameters_in_norms(model: nn.Module) -> set[int]:
    return {
        id(parameter)
        for module in model.modules()
        if "Norm" in type(module).__name__
        for parameter in module.parameters(recurse=False)
    }
