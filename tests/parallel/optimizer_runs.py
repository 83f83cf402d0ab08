"""Short runs, one for each optimizer and for what goes along with one, in one process or on several ranks."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from tputrain import ExecutionConfig, OptimConfig, RunConfig, Trainer, TrainerConfig
from tputrain.checkpoint.store import CheckpointConfig
from tputrain.loggers.config import LogConfig
from tputrain.models import LoraConfig, add_lora
from tputrain.optim.schedule import ScheduleConfig
from tputrain.parallel.config import ParallelConfig

STEPS, MIDDLE, BAD = 6, 3, 5


@dataclass(frozen=True)
class Way:
    """What differs from a plain run."""

    optim: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    execution: str = "fused"
    """Of ranks; one process that is no rank runs it without compilation."""
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    parallel: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    """Of the run of one process that it is compared with."""


def _with_state_from_before(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adagrad(parameters, lr=3e-3)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


WAYS = {
    "adafactor": Way(optim={"name": "adafactor"}),
    "average": Way(optim={"ema_decay": 0.5}, parallel={"placement": {"blocks.*.weight": [None, "shard"]}}),
    "compiled": Way(execution="compile"),
    "given": Way(optimizer=_with_state_from_before),
    "lora": Way(lora=True, optim={"ema_decay": 0.5}),
    "masters": Way(optim={"master_weights": True}, device="tpu"),
    "muon": Way(optim={"name": "muon", "weight_decay": 0.1}, device="tpu"),
    # Beside one process on the same device: there step counts are on the host, which go on at a bad step.
    "rollback": Way(trainer={"on_nonfinite": "rollback"}, device="tpu"),
    "rounded": Way(optim={"mean_dtype": "bfloat16", "squares_dtype": "bfloat16"}),
    "schedulefree": Way(optim={"name": "schedulefree"}),
    "skip": Way(trainer={"on_nonfinite": "skip"}, optim={"ema_decay": 0.5}, device="tpu"),
}


def begin_from_middle(source: Path, run_dir: Path) -> None:
    """Make a run of its own that is to go on from the middle of another one."""
    shutil.copytree(source, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS}")


class Net(nn.Module):
    """Two blocks, which are divided one by one, and a rest. Rows of 7 and 5 do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(*sizes) for sizes in ((4, 6), (6, 7)))
        self.norm, self.head = nn.LayerNorm(7), nn.Linear(7, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = torch.tanh(block(inputs.to(block.weight.dtype)))
        return self.head(self.norm(inputs))


class Batches:
    """By step: eight samples, in micro-batches of so many."""

    def __init__(self, samples: int, makes_nan: bool = False):
        """`makes_nan`: the last sample of step BAD, which is not the first rank's, makes one."""
        self.samples, self.makes_nan = samples, makes_nan

    def batch_at(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs, labels = torch.rand(8, 4, generator=generator), torch.randint(4, (8,), generator=generator)
        if self.makes_nan and step + 1 == BAD:
            inputs[-1, 0] = torch.nan
        rows = slice(micro * self.samples, (micro + 1) * self.samples)
        return [inputs[rows], labels[rows]]


def model_of(way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = Net()
    if way.lora:
        add_lora(model, LoraConfig(rank=2, match=["blocks.*"]), seed=1)
    return model


def train(way: Way, run_dir: Path, device: str, accumulate: int = 1, **parallel: Any) -> Trainer:
    """STEPS steps, with checkpoints and evaluations in the beginning, the middle and the end."""
    model = model_of(way).to(device)
    optimizer = None if way.optimizer is None else way.optimizer(list(model.parameters()))
    loader = Batches(8 // accumulate, makes_nan="on_nonfinite" in way.trainer)
    form = way.execution if device == "tpu" else "fused"
    cfg = RunConfig(
        device=device,
        run_dir=str(run_dir),
        trainer=TrainerConfig(
            steps=STEPS, accumulate=accumulate, evaluate_every=MIDDLE, max_grad_norm=0.5, **way.trainer
        ),
        optim=OptimConfig(**({"learning_rate": 1e-2} | way.optim)),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=MIDDLE, keep_last=9),
        log=LogConfig(every=2, progress="none"),
        execution=ExecutionConfig(train=form, validate=form),
        parallel=ParallelConfig(**(way.parallel | parallel)),
    )
    trainer = Trainer(
        model,
        cfg,
        train_loader=loader,
        val_loader=[Batches(8).batch_at(100, 0)],
        optimizer=optimizer,
        lr_scheduler=None if optimizer is None else LambdaLR(optimizer, lambda step: 0.9**step),
    )
    trainer.fit()
    return trainer
