"""Where a run's numbers go, and the loggers for it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tputrain.config_checks import Settings, expect_above, expect_at_least, expect_choice
from tputrain.loggers.console import console_logger
from tputrain.loggers.jsonl import JsonlLogger
from tputrain.loggers.logger import Logger
from tputrain.loggers.tensorboard import TensorBoardLogger
from tputrain.loggers.wandb import WandbConfig, WandbLogger


@dataclass(frozen=True)
class LogConfig(Settings):
    """How often values are read from the device, how progress is shown, and who else hears of it."""

    every: int = 10
    """Steps between reads of the device; every step is logged all the same."""
    progress: str = "auto"
    """bar, plain, none, or auto: a bar on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Whether curves are written for TensorBoard, to `run_dir/tensorboard`."""
    wandb: WandbConfig = field(default_factory=WandbConfig)
    peak_flops: float | None = None
    """Peak FLOP/s of the chip, which MFU is a share of; None: as known by the chip's name, else no MFU."""

    def __post_init__(self) -> None:
        expect_at_least("log.every", self.every, 1)
        expect_choice("log.progress", self.progress, ("auto", "bar", "plain", "none"))
        expect_above("log.peak_flops", self.peak_flops, 0.0)


def build_loggers(cfg: LogConfig, run_dir: Path | None, run_config: dict[str, Any]) -> list[Logger]:
    """Those that `cfg` asks for: the console's, and where there is a `run_dir` also those that write.

    `run_config` is the whole configuration of the run, for loggers that show it.
    """
    loggers: list[Logger] = [console_logger(cfg.progress)]
    if run_dir is not None:
        loggers.append(JsonlLogger(run_dir))
    if cfg.tensorboard:
        loggers.append(TensorBoardLogger(run_dir))
    if cfg.wandb.mode != "off":
        loggers.append(WandbLogger(cfg.wandb, run_dir, run_config))
    return loggers
