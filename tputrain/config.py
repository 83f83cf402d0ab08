"""The settings of a run: the small dataclasses that each component owns, put together."""

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike, fspath

from tputrain.callbacks.config import CallbacksConfig
from tputrain.checkpoint.store import CheckpointConfig
from tputrain.config_checks import (
    Settings,
    expect,
    expect_above,
    expect_at_least,
    expect_choice,
    expect_types,
)
from tputrain.device import DEVICES
from tputrain.duration import Duration
from tputrain.execution import ExecutionConfig
from tputrain.loggers.config import LogConfig
from tputrain.metrics.named import check_metric_names
from tputrain.optim.config import OptimConfig
from tputrain.optim.schedule import ScheduleConfig
from tputrain.parallel.config import ParallelConfig
from tputrain.watchdog import WatchdogConfig


@dataclass(frozen=True)
class TrainerConfig(Settings):
    """The training loop itself."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    duration: str | None = None
    """In place of `steps`: so many steps, epochs, tokens, samples, or so much time of training, as in 2ep,
    1.5B tokens or 30min. The run ends with the step that reaches it. None: `steps` counts."""
    accumulate: int = 1
    """Micro-batches a step. In a recipe it follows from batch.tokens and must be left out."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this norm; None: never."""
    max_grad_value: float | None = None
    """Before that, each element of a gradient is bounded to +- this; None: never."""
    evaluate_every: int | None = 100
    """Steps between evaluations, which also open (`evaluate_first`) and close the run; None: only those."""
    evaluate_first: bool = True
    """Whether an evaluation opens the run, before its first step."""
    evaluate_batches: int | None = None
    """Batches of an evaluation; None: all there are."""
    metrics: list[str] = field(default_factory=list)
    """What evaluations measure beside the loss, by the names in `tputrain.metrics.named`."""
    on_nonfinite: str = "stop"
    """What a loss or gradient norm that is infinite or NaN does: stop (nothing more is saved), skip (the
    update is not made), rollback (to the newest checkpoint, and past that batch) or continue."""
    spike_factor: float | None = None
    """A gradient norm over so many times the median of the last 100 steps' counts like one that is NaN."""
    nonfinite_limit: int = 10
    """skip: so many such steps in a row, and rollback: so many in a run, are borne; then the run stops."""
    recompile_budget: int | None = 16
    """So many programs may steps compile after the first step; then a warning names what compiles them most.
    None: never."""
    collect_garbage_every: int = 100
    """Steps between Python's garbage collections."""

    def __post_init__(self) -> None:
        for key in ("steps", "accumulate", "evaluate_every", "evaluate_batches", "collect_garbage_every"):
            expect_at_least(f"trainer.{key}", getattr(self, key), 1)
        if self.duration is not None:
            Duration.of(self.duration)
        expect_at_least("trainer.recompile_budget", self.recompile_budget, 0)
        expect_at_least("trainer.nonfinite_limit", self.nonfinite_limit, 1)
        expect_above("trainer.max_grad_norm", self.max_grad_norm, 0.0)
        check_metric_names("trainer.metrics", self.metrics)
        expect_above("trainer.max_grad_value", self.max_grad_value, 0.0)
        expect_choice("trainer.on_nonfinite", self.on_nonfinite, ("stop", "skip", "rollback", "continue"))
        expect_above("trainer.spike_factor", self.spike_factor, 1.0)
        expect(
            self.spike_factor is None or self.on_nonfinite != "continue",
            "trainer.spike_factor",
            self.spike_factor,
            "none with trainer.on_nonfinite=continue, which does nothing about spikes",
        )

    @cached_property
    def length(self) -> Duration:
        """Of the whole run."""
        if self.duration is not None:
            return Duration.of(self.duration)
        return Duration(self.steps, "steps", f"trainer.steps={self.steps}")


@dataclass(frozen=True)
class RunConfig(Settings):
    """Everything the Trainer is told. `tputrain.recipe.RecipeConfig` adds the model and the data."""

    seed: int = 0
    """Of all randomness: initial values, the order of data, dropout."""
    device: str = "auto"
    """auto or tpu: XLA on a TPU, a GPU or the cpu; cpu: PyTorch's own kernels."""
    run_dir: str | None = None
    """Where checkpoints and metrics go; None: nothing is written (a recipe's default is runs/<recipe>)."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)

    def __post_init__(self) -> None:
        run_dir: object = self.run_dir
        if isinstance(run_dir, PathLike):
            object.__setattr__(self, "run_dir", fspath(run_dir))
        expect_types(self)
        expect(
            self.run_dir is None or "://" not in self.run_dir,
            "run_dir",
            self.run_dir,
            "a local directory; checkpoint.mirror=URL copies what is saved there to other storage",
        )
        expect(0 <= self.seed < 2**63, "seed", self.seed, "0 or more, below 2^63")
        expect(
            self.device not in ("cuda", "gpu"),
            "device",
            self.device,
            f"one of {', '.join(DEVICES)}; for an NVIDIA GPU, device=tpu with TPU_PLATFORM=cuda set",
        )
        expect_choice("device", self.device, DEVICES)
        expect(
            self.optim.name != "schedulefree" or self.schedule.name == "constant",
            "schedule.name",
            self.schedule.name,
            "constant with optim.name=schedulefree (schedule.warmup_steps is used)",
        )
        expect(
            self.execution.train != "captured" or self.trainer.spike_factor is None,
            "trainer.spike_factor",
            self.trainer.spike_factor,
            "none with execution.train=captured, whose steps do not see a limit that moves",
        )
        is_all_on_device = self.optim.computes_on_device and self.optim.ema_decay is None
        expect(
            self.execution.train != "captured" or is_all_on_device,
            "execution.train",
            self.execution.train,
            "another form, as optim.ema_decay and all of optim.name but adamw and sgd compute on the host "
            "with the step's number or rate",
        )
