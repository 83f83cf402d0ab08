"""trainer.log: numbers from callbacks, models and losses, read at log steps only."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tputrain.kept_records import KeptRecords
from tputrain import Callback, ExecutionConfig, LogConfig, RunConfig, Trainer, TrainerConfig, UserError

DEVICES = ["cpu", "tpu"]


class Net(nn.Module):
    """Logs the mean of its activations with `log`, once it has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.head, self.log = nn.Linear(4, 8), nn.Linear(8, 3), None

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.net(inputs))
        if self.log is not None:
            self.log("hidden", hidden.mean())
        return self.head(hidden)


class Batches:
    def batch_at(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2 * step + micro)
        return [torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)]


def trained(device: str, steps: int = 6, form: str = "fused", callbacks: Any = (), **more: Any) -> Any:
    records = KeptRecords()
    cfg = RunConfig(
        device=device,
        trainer=TrainerConfig(steps=steps, accumulate=2, evaluate_every=None, **more.pop("trainer", {})),
        execution=ExecutionConfig(train=form, first_steps=0),
        log=LogConfig(every=3, progress="none", peak_flops=1e9),
    )
    trainer = Trainer(Net(), cfg, train_loader=Batches(), loggers=[records], callbacks=callbacks, **more)
    return trainer, records


@pytest.mark.parametrize("device", DEVICES)
def test_what_a_model_a_loss_and_a_callback_log_is_in_the_record_of_its_step(device):
    class Norms(Callback):
        def on_step_start(self, trainer):
            trainer.log("started", trainer.step)

        def on_before_optimizer_step(self, trainer):
            trainer.log("head_norm", trainer.model.head.weight.grad.norm())

        def on_step_end(self, trainer):
            trainer.log("ended", trainer.step)

        def on_log(self, trainer, records):
            trainer.log("logged", len(records))

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        trainer.log("largest", output.abs().max())
        return F.cross_entropy(output, target)

    evaluation = [Batches().batch_at(100, 0), Batches().batch_at(101, 0)]
    trainer, records = trained(device, callbacks=[Norms()], loss_fn=loss_fn, val_loader=evaluation)
    trainer.model.log = trainer.log
    trainer.fit()

    plain, expected = trained(device, val_loader=evaluation, loss_fn=F.cross_entropy)
    plain.fit()
    for ours, theirs in zip(records.steps, expected.steps, strict=True):
        assert ours["loss_hex"] == theirs["loss_hex"]  # nothing else changes
        assert ours["started"] == ours["step"] - 1
        assert ours["ended"] == ours["step"]
        assert ours["head_norm"] <= ours["grad_norm"] * 1.00001
    assert [record.get("logged") for record in records.steps] == [None, 1.0, None, 2.0, None, None]
    model = Net()
    hidden = [torch.tanh(model.net(Batches().batch_at(0, micro)[0])).mean().item() for micro in (0, 1)]
    assert records.steps[0]["hidden"] == pytest.approx(sum(hidden) / 2, abs=1e-6)
    first, last = records.evaluations
    hidden = [torch.tanh(model.net(batch[0])).mean().item() for batch in evaluation]
    assert first["hidden"] == pytest.approx(sum(hidden) / 2, abs=1e-6)
    assert set(last) - set(expected.evaluations[1]) == {"hidden", "largest"}


def test_values_stay_on_the_device_until_a_log_step():
    trainer, records = trained("tpu", steps=12)
    trainer.model.log = trainer.log
    reads: list[int] = []

    class Counts(Callback):
        def on_step_end(self, trainer):
            reads.append(torch.tpu.compile_stats()["host_reads"])

    trainer.callbacks.append(Counts())
    trainer.fit()
    changes = [after - before for before, after in itertools.pairwise(reads)]
    # After step 1, and after 3, 6 and 9: loss, norm and `hidden` of each step.
    assert changes == [3, 0, 6, 0, 0, 9, 0, 0, 9, 0, 0]
    assert all("hidden" in record for record in records.steps)


def test_a_captured_step_logs_tensors_anew_in_each_replay_and_refuses_what_would_be_stale():
    trainer, records = trained("tpu", steps=9, form="captured")
    trainer.model.log = trainer.log
    trainer.fit()
    fused, expected = trained("tpu", steps=9)
    fused.model.log = fused.log
    fused.fit()
    ours, theirs = ([record["hidden"] for record in each.steps] for each in (records, expected))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(set(ours)) == 9

    trainer, _ = trained("tpu", form="captured")
    trainer.model.log = lambda name, value: trainer.log(name, 1.0)
    with pytest.raises(
        UserError, match=r"^trainer.log\('hidden', ...\): 1.0: expected a tensor with execution"
    ):
        trainer.fit()

    class Backward(Callback):
        def on_after_backward(self, trainer):
            pass

    trainer, _ = trained("tpu", form="captured", callbacks=[Backward()])
    with pytest.raises(UserError, match=r"^execution.train=captured: Backward has on_after_backward, and"):
        trainer.fit()


def test_a_compiled_model_may_log():
    trainer, records = trained("cpu", form="compile")
    trainer.model.log = trainer.log
    trainer.fit()
    assert [set(record) & {"hidden"} for record in records.steps] == [{"hidden"}] * 6


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "loss",
            1.0,
            r"^trainer.log\('loss', ...\): expected a name that no record has yet, such as 'my_loss'",
        ),
        ("learning_rate_group_1", 1.0, "expected a name that no record has yet"),
        ("", 1.0, "expected a name"),
        (
            "x",
            torch.ones(3),
            r"^trainer.log\('x', ...\): a tensor of shape \(3,\): expected a number or a tensor",
        ),
        ("x", "high", "^trainer.log.*: high: expected a number"),
        ("x", None, "^trainer.log.*: null: expected a number"),
    ],
)
def test_what_cannot_be_logged_is_refused_at_once(name, value, message):
    trainer, _ = trained("cpu")
    with pytest.raises(UserError, match=message):
        trainer.log(name, value)


def test_a_name_of_a_metric_is_refused():
    trainer, _ = trained("cpu", val_loader=[Batches().batch_at(9, 0)], trainer={"metrics": ["accuracy"]})
    trainer.model.log = lambda name, value: trainer.log("accuracy", value)
    with pytest.raises(
        UserError, match=r"^trainer.log\('accuracy', ...\): expected another name than that of"
    ):
        trainer.fit()
