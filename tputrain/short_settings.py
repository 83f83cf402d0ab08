"""The settings that most runs change, by one word each: `Trainer(model, steps=300, run_dir="runs/mine")`."""

from dataclasses import replace
from os import PathLike
from typing import Any, TypedDict

from tputrain.config import RunConfig
from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import UserError


class ShortSettings(TypedDict, total=False):
    """Each is the setting of that name in `RunConfig` or one of its groups."""

    run_dir: str | PathLike[str] | None
    device: str
    seed: int
    steps: int
    duration: str | None
    accumulate: int
    max_grad_norm: float | None
    evaluate_every: int | None
    learning_rate: float
    weight_decay: float
    warmup_steps: int


# The others are RunConfig's own.
_GROUPS = {
    "trainer": ("steps", "duration", "accumulate", "max_grad_norm", "evaluate_every"),
    "optim": ("learning_rate", "weight_decay"),
    "schedule": ("warmup_steps",),
}


def with_short_settings(cfg: Any, settings: ShortSettings) -> Any:
    """`cfg` (None: the defaults) with `settings`, which win over it.

    Raises UserError, one line, for an unknown name and for a value that does not fit.
    """
    known = list(ShortSettings.__annotations__)
    for name in settings:
        if name not in known:
            hint = did_you_mean(nearest(name, known))
            raise UserError(
                f"Trainer: {name}: no such argument; of the settings it takes {', '.join(known)}, and all of "
                f"them in a RunConfig{hint}"
            )
    if cfg is None:
        cfg = RunConfig()
    if not settings or not isinstance(cfg, RunConfig):
        return cfg
    if settings.get("steps") is not None:
        if settings.get("duration") is not None:
            raise UserError(
                f"Trainer: duration={settings['duration']}: expected nothing beside steps={settings['steps']}"
            )
        settings = {**settings, "duration": None}  # the one that a word names wins over that of `cfg`
    rest: dict[str, Any] = dict(settings)
    groups = {
        group: {name: rest.pop(name) for name in names if name in rest} for group, names in _GROUPS.items()
    }
    changed = {group: replace(getattr(cfg, group), **values) for group, values in groups.items() if values}
    return replace(cfg, **changed, **rest)
