"""The callbacks that a recipe can switch on."""

from dataclasses import dataclass, field

from tputrain.callbacks.best_checkpoint import BestCheckpoint, BestCheckpointConfig
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.early_stopping import EarlyStopping, EarlyStoppingConfig
from tputrain.callbacks.profile_steps import ProfileConfig, ProfileSteps
from tputrain.callbacks.time_limit import TimeLimit, TimeLimitConfig
from tputrain.config_checks import Settings


@dataclass(frozen=True)
class CallbacksConfig(Settings):
    """All of them off by default: each is switched on by the first of its keys."""

    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    best_checkpoint: BestCheckpointConfig = field(default_factory=BestCheckpointConfig)
    time_limit: TimeLimitConfig = field(default_factory=TimeLimitConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)


def build_callbacks(cfg: CallbacksConfig) -> list[Callback]:
    """Those that `cfg` switches on, in a fixed order."""
    stopping, best, profiling = cfg.early_stopping, cfg.best_checkpoint, cfg.profile
    callbacks: list[Callback] = []
    if stopping.patience is not None:
        callbacks.append(EarlyStopping(stopping.patience, stopping.metric, stopping.mode, stopping.min_delta))
    if best.metric is not None:
        callbacks.append(BestCheckpoint(best.metric, best.mode))
    if cfg.time_limit.minutes is not None:
        callbacks.append(TimeLimit(cfg.time_limit.minutes))
    if profiling.active is not None:
        callbacks.append(ProfileSteps(profiling.active, profiling.wait, profiling.warmup, profiling.repeat))
    return callbacks
