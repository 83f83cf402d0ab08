"""tputrain: train PyTorch models on TPUs, and on the machine in front of you.

`Trainer(model, RunConfig(...), train_loader=...).fit()`, or `tputrain run llama` on the command line.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tputrain.parallel.launched import is_launched, speak_in_one_line
from tputrain.versions import __version__ as __version__

if TYPE_CHECKING:
    from tputrain.callbacks.best_checkpoint import BestCheckpoint as BestCheckpoint
    from tputrain.callbacks.callback import Callback as Callback
    from tputrain.callbacks.config import CallbacksConfig as CallbacksConfig
    from tputrain.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from tputrain.callbacks.profile_steps import ProfileSteps as ProfileSteps
    from tputrain.callbacks.time_limit import TimeLimit as TimeLimit
    from tputrain.checkpoint.store import CheckpointConfig as CheckpointConfig
    from tputrain.config import RunConfig as RunConfig
    from tputrain.config import TrainerConfig as TrainerConfig
    from tputrain.errors import RunFailedError as RunFailedError
    from tputrain.errors import UserError as UserError
    from tputrain.execution import ExecutionConfig as ExecutionConfig
    from tputrain.job import Recipe as Recipe
    from tputrain.job import load_recipe as load_recipe
    from tputrain.loggers.config import LogConfig as LogConfig
    from tputrain.loggers.logger import Logger as Logger
    from tputrain.loop.step import TrainStep as TrainStep
    from tputrain.loop.step_parts import StepParts as StepParts
    from tputrain.loop.step_parts import StepResult as StepResult
    from tputrain.models.vocabulary_loss import linear_cross_entropy as linear_cross_entropy
    from tputrain.optim.config import OptimConfig as OptimConfig
    from tputrain.optim.groups import GroupConfig as GroupConfig
    from tputrain.optim.joint import JointOptimizer as JointOptimizer
    from tputrain.optim.schedule import ScheduleConfig as ScheduleConfig
    from tputrain.parallel.config import ParallelConfig as ParallelConfig
    from tputrain.trainer import Trainer as Trainer

_HOME = {
    "BestCheckpoint": "tputrain.callbacks.best_checkpoint",
    "Callback": "tputrain.callbacks.callback",
    "CallbacksConfig": "tputrain.callbacks.config",
    "CheckpointConfig": "tputrain.checkpoint.store",
    "EarlyStopping": "tputrain.callbacks.early_stopping",
    "ExecutionConfig": "tputrain.execution",
    "JointOptimizer": "tputrain.optim.joint",
    "LogConfig": "tputrain.loggers.config",
    "GroupConfig": "tputrain.optim.groups",
    "Logger": "tputrain.loggers.logger",
    "OptimConfig": "tputrain.optim.config",
    "ParallelConfig": "tputrain.parallel.config",
    "ProfileSteps": "tputrain.callbacks.profile_steps",
    "Recipe": "tputrain.job",
    "RunConfig": "tputrain.config",
    "RunFailedError": "tputrain.errors",
    "ScheduleConfig": "tputrain.optim.schedule",
    "StepParts": "tputrain.loop.step_parts",
    "StepResult": "tputrain.loop.step_parts",
    "TimeLimit": "tputrain.callbacks.time_limit",
    "TrainStep": "tputrain.loop.step",
    "Trainer": "tputrain.trainer",
    "TrainerConfig": "tputrain.config",
    "UserError": "tputrain.errors",
    "linear_cross_entropy": "tputrain.models.vocabulary_loss",
    "load_recipe": "tputrain.job",
}
__all__ = list(_HOME)


if is_launched():
    speak_in_one_line()


def __getattr__(name: str) -> Any:
    # Torch takes seconds to import: the command line prints its first line before anything here needs it.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tputrain' has no attribute {name!r}")
