"""A step whose values are not numbers: found, kept, explained, and done without."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from tputrain import (
    CheckpointConfig,
    LogConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    UserError,
)
from tputrain.guard.bad_step_report import data_to_blame
from tputrain.guard.first_nonfinite import looking_for_nonfinite
from tputrain.loggers.jsonl import read_jsonl
from tputrain.loggers.logger import Logger

STEPS, BAD = 9, 5
DEVICES = ["cpu", "tpu"]


class Model(nn.Module):
    """Has a line that makes a NaN of a negative input, a buffer that keeps it, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.dropout = nn.Linear(4, 3), nn.BatchNorm1d(4), nn.Dropout(0.2)

    def forward(self, inputs: Tensor) -> Tensor:
        roots = torch.sqrt(inputs)  # the culprit
        return self.net(self.dropout(self.norm(roots)))


class Batches:
    """Random batches by step; those of `bad` steps (from 1) have a negative input."""

    def __init__(self, *bad: int):
        self.bad = bad

    def batch_at(self, step: int, micro: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + micro)
        inputs, labels = torch.rand(6, 4, generator=generator), torch.randint(3, (6,), generator=generator)
        if step + 1 in self.bad and micro == 1:
            inputs[2, 1] = -4.0
        return [inputs, labels]


class Values(Logger):
    def __init__(self) -> None:
        self.drains: list[int] = []

    def log(self, records: list[dict]) -> None:
        self.drains.append(len(records))


def trainer_of(
    run_dir: Path | None,
    device: str,
    policy: str,
    loader: Batches,
    steps: int = STEPS,
    limit: int = 10,
    saved_every: int = 2,
    logged_every: int = 3,
) -> Trainer:
    torch.manual_seed(1)
    cfg = RunConfig(
        device=device,
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(steps=steps, accumulate=2, on_nonfinite=policy, nonfinite_limit=limit),
        optim=OptimConfig(learning_rate=0.02),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=saved_every, keep_last=9),
        log=LogConfig(every=logged_every, progress="none"),
    )
    return Trainer(Model(), cfg, train_loader=loader)


def losses(run_dir: Path) -> list[str]:
    records = read_jsonl(run_dir / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss_hex"] for record in records]


def assert_report_names_the_culprit(run_dir: Path, note: str) -> None:
    directory = run_dir / "nonfinite" / f"step-{BAD}"
    report = json.loads((directory / "report.json").read_text())
    assert report["record"]["step"] == BAD
    assert report["record"]["loss"] == "nan"
    assert report["not_finite_in_batch"] == {}
    assert note in report["replay"]["note"]
    first = report["replay"]["nan"]
    assert first["op"] == "aten.sqrt.default"
    assert "test_bad_steps.py" in first["line"]
    assert "roots = torch.sqrt(inputs)" in first["line"]
    (given,) = first["inputs"]
    assert (given["shape"], given["dtype"], given["min"], given["nan"]) == ([6, 4], "float32", -4.0, 0)
    for micro in (0, 1):
        inputs, labels = Batches(BAD).batch_at(BAD - 1, micro)
        saved = load_file(directory / f"batch-{micro}.safetensors")
        assert torch.equal(saved["0"], inputs)
        assert torch.equal(saved["1"], labels)


@pytest.mark.parametrize("device", DEVICES)
def test_stop_goes_back_and_says_which_line_made_the_first_nan(tmp_path, device):
    trainer = trainer_of(tmp_path, device, "stop", Batches(BAD))
    with pytest.raises(UserError, match=rf"step {BAD}: loss is nan; the run stops") as caught:
        trainer.fit()
    said = str(caught.value)
    assert "\n" not in said
    assert f"its batch is in {tmp_path / 'nonfinite' / f'step-{BAD}'}" in said
    assert "aten.sqrt.default made the first NaN from (float32[6, 4] from -4.0 to" in said
    assert_report_names_the_culprit(tmp_path, "from the state that the step had")
    assert trainer.store.steps() == [4, 2]


def test_a_micro_batch_without_labels_is_not_blamed(tmp_path):
    class Unlabelled(Batches):
        def batch_at(self, step: int, micro: int) -> list[Tensor]:
            inputs, labels = super().batch_at(step, micro)
            if step + 1 == BAD and micro == 0:
                labels.fill_(-100)
            return [inputs, labels]

    with pytest.raises(UserError, match=r"aten\.sqrt\.default made the first NaN"):
        trainer_of(tmp_path, "cpu", "stop", Unlabelled(BAD)).fit()


def test_skip_leaves_the_weights_as_if_the_bad_step_had_not_been(tmp_path, capsys):
    trainer = trainer_of(tmp_path, "cpu", "skip", Batches(BAD))
    trainer.fit()
    assert trainer.step == STEPS
    found = losses(tmp_path)
    assert [step for step, loss in enumerate(found, 1) if not math.isfinite(float.fromhex(loss))] == [BAD]
    before, after = (
        load_file(tmp_path / "checkpoints" / f"step-{step}" / "model.safetensors") for step in (4, 6)
    )
    assert not torch.equal(before["net.weight"], after["net.weight"])
    for values in trainer.model.state_dict().values():
        assert bool(torch.isfinite(values).all())
    assert_report_names_the_culprit(tmp_path, "with the weights of step 6")
    assert f"step {BAD}: loss is nan: its update was not made" in capsys.readouterr().out


@pytest.mark.parametrize("device", DEVICES)
def test_a_skipped_update_changes_nothing_at_all(device):
    trainer = trainer_of(None, device, "skip", Batches(1), steps=1)
    before = {name: values.cpu().clone() for name, values in trainer.model.state_dict().items()}
    trainer.fit()
    for name, values in trainer.model.state_dict().items():
        assert torch.equal(values.cpu(), before[name]), name
    for state in trainer.optimizer.state.values():
        assert not bool(state["exp_avg"].any())


def test_where_nothing_is_bad_skip_computes_what_stop_does(tmp_path):
    for policy in ("stop", "skip"):
        trainer_of(tmp_path / policy, "cpu", policy, Batches()).fit()
    ours, theirs = (
        [float.fromhex(loss) for loss in losses(tmp_path / policy)] for policy in ("skip", "stop")
    )
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_rollback_goes_back_and_past_the_bad_batch_and_logs_each_step_once(tmp_path, capsys):
    trainer = trainer_of(tmp_path, "cpu", "rollback", Batches(BAD))
    trainer.fit()
    assert trainer.step == STEPS
    found = losses(tmp_path)
    assert len(found) == STEPS
    assert [step for step, loss in enumerate(found, 1) if not math.isfinite(float.fromhex(loss))] == [BAD]
    assert_report_names_the_culprit(tmp_path, "from the state that the step had")
    said = capsys.readouterr().out
    assert f"step {BAD}: loss is nan: back to step 4, and on past it without its update" in said
    # What it comes to is what a run that was told to skip comes to.
    trainer_of(tmp_path / "skip", "cpu", "skip", Batches(BAD)).fit()
    numbers = ([float.fromhex(loss) for loss in losses(run)] for run in (tmp_path, tmp_path / "skip"))
    for ours, theirs in zip(*numbers, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_report_that_the_disk_does_not_take_ends_no_run(tmp_path, policy, capfd):
    (tmp_path / "nonfinite").touch()  # no directory can be made there
    trainer = trainer_of(tmp_path, "cpu", policy, Batches(BAD))
    trainer.fit()
    assert trainer.step == trainer.cfg.trainer.steps
    said = capfd.readouterr().err
    assert f"step-{BAD}: the batch of a bad step cannot be kept (Not a directory" in said
    assert (f"step-{BAD}: what the replay of a bad step found cannot be kept" in said) is (
        policy == "rollback"
    )


def test_a_step_that_a_rollback_left_out_stays_left_out_after_a_resume(tmp_path):
    trainer_of(tmp_path / "whole", "cpu", "rollback", Batches(BAD)).fit()
    trainer_of(tmp_path / "parts", "cpu", "rollback", Batches(BAD), steps=7).fit()
    trainer_of(tmp_path / "parts", "cpu", "rollback", Batches(BAD)).fit()
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    state = json.loads((tmp_path / "parts" / "checkpoints" / f"step-{STEPS}" / "state.json").read_text())
    assert state["bad_steps"]["left_out"] == [BAD]


@pytest.mark.parametrize("bad", [1, 2])
def test_before_the_first_checkpoint_a_run_goes_back_to_its_beginning(tmp_path, bad):
    trainer = trainer_of(tmp_path / "stop", "tpu", "stop", Batches(bad))
    with pytest.raises(UserError, match=rf"step {bad}: loss is nan.*aten.sqrt.default made the first NaN"):
        trainer.fit()
    directories = {path.name for path in (tmp_path / "stop").iterdir() if path.is_dir()}
    assert directories == {"nonfinite"}  # nothing is left of what it went back to: it begins anew
    assert len(losses(tmp_path / "stop")) == bad  # what led to it is kept

    trainer = trainer_of(tmp_path / "rollback", "tpu", "rollback", Batches(bad))
    trainer.fit()
    found = [float.fromhex(loss) for loss in losses(tmp_path / "rollback")]
    assert [step for step, loss in enumerate(found, 1) if not math.isfinite(loss)] == [bad]


def test_without_a_directory_there_is_nothing_to_go_back_to_and_a_rollback_is_a_stop():
    with pytest.raises(UserError, match="step 3: loss is nan; the run stops"):
        trainer_of(None, "cpu", "rollback", Batches(3)).fit()


class Spike(Batches):
    """One of the steps has inputs a thousand times the others'."""

    def batch_at(self, step, micro):
        inputs, labels = Batches().batch_at(step, micro)
        return [inputs * 1000 if step + 1 in self.bad else inputs, labels]


def spiking(run_dir: Path, policy: str, device: str, *bad: int, steps: int = 30) -> Trainer:
    trainer = trainer_of(run_dir, device, policy, Spike(*bad), steps=steps)
    cfg = replace(trainer.cfg, trainer=replace(trainer.cfg.trainer, spike_factor=20.0))
    torch.manual_seed(1)
    return Trainer(nn.Linear(4, 3), cfg, train_loader=Spike(*bad))


def test_a_spike_is_left_out_by_skip_and_by_rollback_alike(tmp_path, capsys):
    runs = {}
    for policy, device in (("skip", "cpu"), ("skip", "tpu"), ("rollback", "cpu")):
        run_dir = tmp_path / policy / device
        trainer = spiking(run_dir, policy, device, 26)
        trainer.fit()
        said = capsys.readouterr().out
        assert re.search(r"step 26: grad_norm is [\d.]+, over the limit of [\d.]+ for spikes: ", said), said
        assert "replay" not in said
        assert (run_dir / "nonfinite" / "step-26" / "batch-1.safetensors").exists()
        runs[policy, device] = [float.fromhex(loss) for loss in losses(run_dir)]
        state = json.loads((run_dir / "checkpoints" / "step-30" / "state.json").read_text())
        norms = state["bad_steps"]["spikes"]["norms"]
        assert len(norms) == 29
        assert max(norms) < 20 * min(norms)
    for other in runs.values():
        assert other == pytest.approx(runs["skip", "cpu"], rel=1e-5)


def test_a_spike_stops_a_run_that_is_to_stop_and_one_before_enough_is_known_does_not(tmp_path):
    with pytest.raises(UserError, match=r"^step 26: grad_norm is .* for spikes; the run stops, .*step-26"):
        spiking(tmp_path / "late", "stop", "cpu", 26).fit()
    trainer = spiking(tmp_path / "early", "stop", "cpu", 5)
    trainer.fit()
    assert trainer.step == 30


def test_the_limit_for_spikes_goes_on_after_a_resume(tmp_path):
    spiking(tmp_path, "skip", "cpu", 26, steps=24).fit()
    spiking(tmp_path, "skip", "cpu", 26).fit()
    assert (tmp_path / "nonfinite" / "step-26").exists()


def test_spikes_that_nothing_is_done_about_are_not_looked_for():
    with pytest.raises(UserError, match=r"trainer.spike_factor=3.0: expected none with .*continue"):
        TrainerConfig(spike_factor=3.0, on_nonfinite="continue")


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_whose_steps_are_all_bad_stops_at_the_limit(tmp_path, policy):
    trainer = trainer_of(tmp_path, "cpu", policy, Batches(*range(3, 99)), steps=99, limit=2)
    with pytest.raises(UserError, match=r"loss is nan; .*trainer.nonfinite_limit=2 is used up"):
        trainer.fit()


@pytest.mark.parametrize("logged_every", [1, 4, 32])
def test_the_limit_counts_every_step_of_a_log_interval(tmp_path, logged_every):
    steps = {"steps": 32, "saved_every": 64, "logged_every": logged_every}
    trainer = trainer_of(tmp_path, "cpu", "skip", Batches(*range(1, 32)), limit=10, **steps)
    with pytest.raises(UserError, match=r"^step 11: loss is nan; .*trainer.nonfinite_limit=10 is used up"):
        trainer.fit()


def test_bad_steps_in_a_row_are_counted_on_after_a_resume(tmp_path):
    bad = Batches(3, 4, 5)
    trainer_of(tmp_path, "cpu", "skip", bad, steps=4, limit=2).fit()
    with pytest.raises(UserError, match=r"^step 5: loss is nan; .*trainer.nonfinite_limit=2 is used up"):
        trainer_of(tmp_path, "cpu", "skip", bad, limit=2).fit()


@pytest.mark.parametrize("policy", ["rollback", "stop"])
def test_steps_that_are_bad_for_the_sake_of_the_first_use_up_no_limit(tmp_path, policy, capsys):
    steps = {"saved_every": 64, "logged_every": STEPS}  # the buffer keeps the NaN from step 3 on
    trainer = trainer_of(tmp_path, "cpu", policy, Batches(3), limit=2, **steps)
    if policy == "rollback":
        trainer.fit()
        assert "step 3: loss is nan: back to step 0, and on past it" in capsys.readouterr().out
    else:
        with pytest.raises(
            UserError, match=r"^step 3: loss is nan; .*aten\.sqrt\.default made the first NaN"
        ):
            trainer.fit()


def test_a_bad_value_in_the_batch_itself_is_named(tmp_path):
    class Poisoned(Batches):
        def batch_at(self, step, micro):
            inputs, labels = super().batch_at(step, micro)
            inputs[0, 0] = math.nan
            return [inputs, labels]

    told = "the data holds NaN or infinity: tensor 0 of batch-0 in row 0; tensor 0 of batch-1 in row 0; mend"
    with pytest.raises(UserError, match=told):
        trainer_of(tmp_path, "cpu", "stop", Poisoned()).fit()
    report = json.loads((tmp_path / "nonfinite" / "step-1" / "report.json").read_text())
    assert report["not_finite_in_batch"]["batch-0: 0"]["nan"] == 1
    assert set(report["replay"]) == {"note"}  # no operation made it


def test_an_infinite_mask_is_not_blamed_for_what_an_operation_made():
    batches = [{"inputs": torch.ones(2), "mask": torch.full((2, 2), -math.inf)}]
    assert data_to_blame({"nan": {"op": "aten.sqrt.default"}}, batches) == []
    assert data_to_blame({}, batches) == ["mask of batch-0 in row 0, 1"]


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_values_are_read_at_log_steps_only_whatever_is_done_about_bad_ones(policy):
    values = Values()
    trainer = trainer_of(None, "tpu", policy, Batches(), steps=12)
    trainer.loggers.append(values)
    reads: list[int] = []
    flush = torch.tpu.flush

    def counted(*arguments) -> None:
        flush(*arguments)
        reads.append(torch.tpu.compile_stats()["host_reads"])

    torch.tpu.flush = counted
    try:
        trainer.fit()
    finally:
        torch.tpu.flush = flush
    assert values.drains == [1, 2, 3, 3, 3]
    assert reads[-1] - reads[0] <= 2 * 12 + 2  # a loss and a norm for each step, and the first step's wait


@pytest.mark.parametrize("device", DEVICES)
def test_what_backward_makes_is_traced_to_its_forward_line(device):
    weight = torch.zeros(3, device=device, requires_grad=True)
    with looking_for_nonfinite() as looking:
        value = (weight * 2).abs().sqrt().sum()  # its value at 0 is 0, its slope there is not
        value.backward()
    assert looking.found["inf"]["line"].startswith("backward of ")
    assert "value = (weight * 2).abs().sqrt().sum()" in looking.found["inf"]["line"]


def test_an_infinity_that_was_put_there_is_not_blamed_and_one_that_was_made_is():
    scores = torch.tensor([1.0, 2.0])
    with looking_for_nonfinite() as looking:
        F.softmax(scores.masked_fill(torch.tensor([True, False]), -math.inf), dim=0)
        assert looking.found == {}
        torch.exp(scores * 100)
    assert looking.found["inf"]["op"] == "aten.exp.default"
    assert looking.found["inf"]["inputs"][0]["max"] == 200.0
