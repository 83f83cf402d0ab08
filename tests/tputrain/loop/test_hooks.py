"""When the hooks of callbacks are called, and what `predict` and `trainer.evaluate_first` do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.tputrain.kept_records import KeptRecords
from tputrain import Callback, CheckpointConfig, LogConfig, OptimConfig, RunConfig, Trainer, TrainerConfig


class Told(Callback):
    """Writes down each hook with the step and the epoch."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_epoch_start(self, trainer, epoch):
        self.told.append(f"epoch {epoch}")

    def on_step_start(self, trainer):
        self.told.append(f"start {trainer.step + 1} in {trainer.epoch}")

    def on_before_backward(self, trainer, loss):
        assert loss.dim() == 0
        assert loss.requires_grad
        self.told.append("backward")

    def on_after_backward(self, trainer):
        assert all(parameter.grad is not None for parameter in trainer.model.parameters())
        self.told.append("gradients")

    def on_before_optimizer_step(self, trainer):
        self.told.append("optimizer")

    def on_step_end(self, trainer):
        assert all(parameter.grad is None for parameter in trainer.model.parameters())
        self.told.append(f"end {trainer.step}")


def trainer_of(loader: Any, run_dir: Any = None, callbacks: Any = (), **trainer: Any) -> Trainer:
    torch.manual_seed(0)
    cfg = RunConfig(
        device="cpu",
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(**{"steps": 4, **trainer}),
        optim=OptimConfig(ema_decay=0.5),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=10, progress="none"),
    )
    return Trainer(nn.Linear(4, 3), cfg, train_loader=loader, callbacks=callbacks)


def batches(count: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)]
        for _ in range(count)
    ]


def test_the_hooks_of_a_step_come_in_order():
    told = Told()
    trainer_of(batches(2), callbacks=[told], steps=2, accumulate=2).fit()
    step = ["backward", "gradients"] * 2 + ["optimizer"]
    assert told.told == [
        *("epoch 0", "start 1 in 0", *step, "end 1"),
        *("epoch 1", "start 2 in 1", *step, "end 2"),
    ]


@pytest.mark.parametrize("kind", ["list", "workers"])
def test_an_epoch_starts_once_also_after_a_resume(kind, tmp_path):
    def loader() -> Any:
        if kind == "list":
            return batches(3)
        samples = TensorDataset(*map(torch.cat, zip(*batches(3), strict=True)))
        return DataLoader(samples, batch_size=6, num_workers=1)  # draws a step ahead

    told = Told()
    for steps in (2, 7):
        trainer_of(loader(), tmp_path, [told], steps=steps).fit()
    starts = [line for line in told.told if line.startswith(("epoch", "start"))]
    assert starts == [
        *("epoch 0", "start 1 in 0", "start 2 in 0", "start 3 in 0"),
        *("epoch 1", "start 4 in 1", "start 5 in 1", "start 6 in 1", "epoch 2", "start 7 in 2"),
    ]


def test_batches_by_step_have_epochs_where_the_loader_tells():
    class ByStep:
        def batch_at(self, step: int, micro: int) -> list[Tensor]:
            return batches(1)[0]

    class WithEpochs(ByStep):
        def epochs_at(self, step: int) -> float:
            return step * 6 / 18

    for loader, epochs in ((ByStep(), []), (WithEpochs(), ["epoch 0", "epoch 1"])):
        told = Told()
        trainer_of(loader, callbacks=[told]).fit()
        assert [line for line in told.told if line.startswith("epoch")] == epochs


def test_a_run_need_not_open_with_an_evaluation():
    for is_first, steps in ((True, [0, 2, 4]), (False, [2, 4])):
        records = KeptRecords()
        trainer = trainer_of(batches(1), evaluate_every=2, evaluate_first=is_first)
        trainer.val_loader, trainer.loggers = batches(1), [records]
        trainer.fit()
        assert [record["step"] for record in records.evaluations] == steps


def test_predict_gives_outputs_of_the_weights_that_evaluations_use():
    trainer = trainer_of(batches(1), steps=3)
    trainer.fit()
    inputs = [batch[0] for batch in batches(3)]
    drawn = torch.get_rng_state()
    outputs = trainer.predict(inputs)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert trainer.model.training
    with trainer.evaluation_weights.in_place(), torch.no_grad():
        expected = [trainer.model(each) for each in inputs]
    for ours, theirs in zip(outputs, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert not ours.requires_grad
    with torch.no_grad():
        assert not torch.equal(outputs[0], trainer.model(inputs[0]))  # it trains at others
    assert torch.equal(trainer.predict(batches(1))[0], outputs[0])  # a target is left out
