"""Averaged weights: what they are, that evaluations and checkpoints hold them, and that training does not."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.tputrain.test_optimizers import Batches, Net, train
from tputrain import (
    Callback,
    CheckpointConfig,
    LogConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
)
from tputrain.optim.evaluation_weights import EvaluationWeights


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_the_average_follows_with_a_decay_that_grows(device):
    parameter = nn.Parameter(torch.zeros(2, device=device))
    model = nn.ParameterDict({"weight": parameter})
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    averaged = EvaluationWeights(model, optimizer, 0.25, torch.device(device))
    averaged.begin(0)
    expected = torch.zeros(2)
    for step in range(5):
        parameter.grad = torch.full((2,), -1.0, device=device)
        optimizer.step()
        decay = min(0.25, (1 + step) / (10 + step))
        expected = expected * decay + (step + 1.0) * (1 - decay)
    with averaged.in_place() as trained:
        torch.testing.assert_close(parameter.detach().cpu(), expected)
        assert torch.equal(trained["weight"].cpu(), torch.full((2,), 5.0))
    assert torch.equal(parameter.detach().cpu(), torch.full((2,), 5.0))


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(("name", "optim"), [("adamw", {"ema_decay": 0.9}), ("schedulefree", {})])
def test_a_checkpoint_holds_the_weights_that_were_evaluated_and_beside_them_those_trained(
    name, optim, device, tmp_path
):
    trainer, _ = train(name, device, 6, tmp_path, **optim)
    checkpoint = tmp_path / "checkpoints" / "step-6"
    evaluated = load_file(checkpoint / "model.safetensors")
    trained = load_file(checkpoint / "trained.safetensors")
    for where, parameter in trainer.model.named_parameters():
        assert torch.equal(trained[where], parameter.detach().cpu())
        assert not torch.equal(trained[where], evaluated[where])

    plain = Net()
    plain.load_state_dict(evaluated)
    inputs, targets = Batches().batch_at(1000, 0)
    loss = nn.functional.cross_entropy(plain(inputs), targets)
    torch.testing.assert_close(torch.tensor(trainer.validate()["loss"]), loss.detach(), rtol=1e-5, atol=1e-6)


class Compilations(Callback):
    """Counts, at each step's end, the programs that were compiled so far."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_end(self, trainer: Trainer) -> None:
        self.counts.append(torch.tpu.compile_stats()["compilations"])  # type: ignore[attr-defined]


def test_all_steps_of_a_run_that_leaves_out_bad_ones_are_one_program_when_it_goes_on_too(tmp_path):
    counts: list[int] = []
    for steps in (3, 5):
        cfg = RunConfig(
            device="tpu",
            run_dir=str(tmp_path),
            trainer=TrainerConfig(steps=steps, on_nonfinite="skip"),
            optim=OptimConfig(ema_decay=0.9),
            schedule=ScheduleConfig(name="constant"),
            checkpoint=CheckpointConfig(every=None),
            log=LogConfig(progress="none"),
        )
        callback = Compilations()
        Trainer(Net(), cfg, train_loader=Batches(), callbacks=[callback]).fit()
        counts += callback.counts
    assert counts[0] > 0
    assert counts == counts[:1] * 5


def test_the_weights_of_a_schedule_free_optimizer_are_those_its_package_gives():
    model = Net()
    optimizer = OptimConfig(name="schedulefree").build(model)
    averaged = EvaluationWeights(model, optimizer, None, torch.device("cpu"))
    for step in range(3):
        inputs, targets = Batches().batch_at(step, 0)
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(model.state_dict())
    with averaged.in_place():
        inside = copy.deepcopy(model.state_dict())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    optimizer.eval()  # type: ignore[attr-defined]
    assert all(torch.equal(value, inside[key]) for key, value in model.state_dict().items())
    assert any(not torch.equal(inside[key], before[key]) for key in before)


def test_without_averages_nothing_is_copied():
    model = Net()
    averaged = EvaluationWeights(model, OptimConfig().build(model), None, torch.device("cpu"))
    versions = [parameter._version for parameter in model.parameters()]
    with averaged.in_place() as trained:
        assert trained == {}
    assert [parameter._version for parameter in model.parameters()] == versions
