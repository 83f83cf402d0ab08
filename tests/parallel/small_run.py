"""A Llama and its data for one process or several ranks, with what is awkward to divide among them."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import nn

from tputrain import Callback, RunConfig, Trainer, TrainerConfig
from tputrain.batches import IGNORED_LABEL
from tputrain.checkpoint.store import CheckpointConfig
from tputrain.loggers.config import LogConfig
from tputrain.models import initialize, vocabulary_loss
from tputrain.models.llama import Llama, LlamaConfig
from tputrain.optim.config import OptimConfig
from tputrain.optim.schedule import ScheduleConfig
from tputrain.parallel.config import ParallelConfig

# 61 and 30 rows do not divide by 4: shards differ in size.
SHAPE = LlamaConfig(
    vocab_size=61,
    hidden_size=20,
    intermediate_size=30,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    max_position_embeddings=16,
)


def recomputing(kind: str) -> Llama:
    """The same, with activation checkpointing."""
    model = Llama(replace(SHAPE, activation_checkpointing=kind))
    initialize(model, 0)
    return model


def without_logits(model: nn.Module | None = None) -> nn.Module:
    """The same, or another model, whose loss is made without logits, few as they are. It asserts that."""
    if model is None:
        model = Llama(SHAPE)
        initialize(model, 0)
    forward = model.forward

    def forward_without(*given: Any, **named: Any) -> Any:
        made = Mock(wraps=vocabulary_loss.linear_cross_entropy)
        with patch.multiple(vocabulary_loss, MANY_LOGITS=0, linear_cross_entropy=made):
            found = forward(*given, **named)
        assert made.call_count == (not model.gives_logits_with_loss)
        return found

    model.forward = forward_without  # type: ignore[method-assign]  # of this model alone
    return model


def batch(seed: int, sequences: int, unlabelled: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, SHAPE.vocab_size, (sequences, 8), generator=generator)
    labels = ids.roll(-1, 1)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = IGNORED_LABEL
    labels[:unlabelled] = IGNORED_LABEL
    return {"input_ids": ids, "labels": labels}


class Batches:
    """By step: eight sequences, in micro-batches of so many.

    Of four ranks and of two, the first rank's rows of each third four have nothing to learn from.
    """

    def __init__(self, sequences: int):
        self.sequences = sequences

    def batch_at(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        fours = [batch(n, 4, unlabelled=2 if n % 3 == 0 else 0) for n in (2 * step, 2 * step + 1)]
        rows = slice(micro * self.sequences, (micro + 1) * self.sequences)
        return {name: torch.cat([each[name] for each in fours])[rows] for name in fours[0]}


# Five samples and three for four ranks: each is to count once.
EVALUATION = [batch(1001, 5, unlabelled=2), batch(1002, 3)]


class Logs(Callback):
    """Logs inside the step and beside it, values that differ by rank."""

    def on_before_backward(self, trainer: Trainer, loss: torch.Tensor) -> None:
        trainer.log("part_of_loss", loss)

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.log("mean_rank", trainer.world.rank)
        if trainer.world.is_first:
            trainer.log("of_first", 1)


class FastClock(Callback):
    """Half an hour passes in each step on the second rank, and next to nothing on the first."""

    def on_step_start(self, trainer: Trainer) -> None:
        trainer.seconds += 1800.0 * trainer.world.rank


def begin_from(source: Path, run_dir: Path) -> None:
    """Make a run of its own that is to go on from the middle of another one."""
    shutil.copytree(source, run_dir)
    shutil.rmtree(run_dir / "checkpoints" / "step-20")


def train(
    run_dir: Path | str,
    device: str,
    model: nn.Module | None = None,
    accumulate: int = 2,
    sequences: int = 4,
    optim: Mapping[str, Any] = MappingProxyType({}),
    steps: int = 20,
    every: int | str = 10,
    **parallel: Any,
) -> Trainer:
    """Training steps, with checkpoints and evaluations in the beginning, the middle and the end."""
    if model is None:
        model = Llama(SHAPE)
        initialize(model, 0)
    cfg = RunConfig(
        device=device,
        run_dir=str(run_dir),
        trainer=TrainerConfig(
            steps=steps, accumulate=accumulate, evaluate_every=10, max_grad_norm=0.5, metrics=["accuracy"]
        ),
        optim=OptimConfig(**({"learning_rate": 3e-3} | optim)),
        schedule=ScheduleConfig(name="constant" if optim.get("name") == "schedulefree" else "cosine"),
        checkpoint=CheckpointConfig(every=every, keep_last=9),
        log=LogConfig(every=5, progress="none", peak_flops=1e9),
        parallel=ParallelConfig(**parallel),
    )
    loaders: dict[str, Any] = {"train_loader": Batches(sequences), "val_loader": EVALUATION}
    trainer = Trainer(model, cfg, **loaders, callbacks=[Logs(), FastClock()])
    trainer.fit()
    return trainer
