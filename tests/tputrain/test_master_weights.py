"""bfloat16 weights with float32 masters: they learn as float32 ones do, and resume to the last bit."""

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.tputrain.test_lora import SMALL, small
from tests.tputrain.test_lora import Batches as Texts
from tests.tputrain.test_optimizers import Batches, Net, Steps
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
from tputrain.models import Llama, initialize, parameters_on_meta
from tputrain.optim.master_weights import MasterWeights

OPTIMIZERS = ["adamw", "sgd", "adafactor", "muon"]


def train(
    device: str,
    steps: int,
    run_dir: Path | None = None,
    master_weights: bool = True,
    model: torch.nn.Module | None = None,
    **optim: object,
) -> tuple[Trainer, Steps]:
    settings = {"name": "adamw", "learning_rate": 0.01, "master_weights": master_weights} | optim
    cfg = RunConfig(
        device=device,
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(steps=steps, on_nonfinite="skip"),
        optim=OptimConfig(**settings),  # type: ignore[arg-type]
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=100, progress="none"),
    )
    seen = Steps()
    data = Batches() if model is None else Texts()
    trainer = Trainer(model or Net(), cfg, train_loader=data, loggers=[seen])
    trainer.fit()
    return trainer, seen


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_the_losses_are_near_those_of_float32_weights(device):
    ours, plain = train(device, 20)[1], train(device, 20, master_weights=False)[1]
    assert ours.records[20]["loss"] < 0.9 * ours.records[1]["loss"]
    for step in (1, 10, 20):
        assert ours.records[step]["loss"] == pytest.approx(plain.records[step]["loss"], rel=0.03), step


@pytest.mark.parametrize(("device", "name"), [("tpu", "adamw"), *(("cpu", name) for name in OPTIMIZERS)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(device, name, tmp_path):
    whole, seen = train(device, 6, tmp_path / "whole", name=name)
    train(device, 3, tmp_path / "parts", name=name)
    parts, again = train(device, 6, tmp_path / "parts", name=name)
    assert sorted(again.records) == [4, 5, 6]
    for step, record in again.records.items():
        assert record["loss_hex"] == seen.records[step]["loss_hex"], step
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs)
        assert torch.equal(parts.optimizer.state[ours]["master"], whole.optimizer.state[theirs]["master"])


def test_a_checkpoint_holds_bfloat16_weights_and_float32_masters_and_state(tmp_path):
    trainer, _ = train("cpu", 2, tmp_path)
    checkpoint = tmp_path / "checkpoints" / "step-2"
    weights, state = (
        load_file(checkpoint / "model.safetensors"),
        load_file(checkpoint / "optimizer.safetensors"),
    )
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(weights[name], state[f"{name}.master"].bfloat16())
        assert torch.equal(weights[name], parameter)


def test_a_rounded_mean_stays_rounded_beside_masters(tmp_path):
    train("cpu", 2, tmp_path, mean_dtype="bfloat16")
    train("cpu", 3, tmp_path)  # a run may go on with either
    trainer, _ = train("cpu", 4, tmp_path, mean_dtype="bfloat16")
    state = load_file(tmp_path / "checkpoints" / "step-4" / "optimizer.safetensors")
    dtypes = {name.rpartition(".")[2]: tensor.dtype for name, tensor in state.items() if tensor.dim() > 0}
    assert dtypes == {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, "master": torch.float32}
    for parameter in trainer.model.parameters():
        assert trainer.optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16


def test_an_update_too_small_for_bfloat16_is_not_lost():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = OptimConfig(
        name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, master_weights=True
    ).build(model)
    for _ in range(64):
        model.weight.grad = torch.full_like(model.weight, 2.0**-12)
        optimizer.step()
    assert model.weight.item() == 1.0 - 64 * 2.0**-12


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_weights_that_are_bfloat16_already_have_masters_in_float32(name):
    def weights_after(dtype: torch.dtype) -> torch.Tensor:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        cfg = OptimConfig(name=name, learning_rate=2.0**-12, weight_decay=0.0, master_weights=True)
        optimizer = cfg.build(model.to(dtype))
        for _ in range(64):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        assert {tensor.dtype for tensor in optimizer.state[model.weight].values()} == {torch.float32}
        assert model.weight.dtype == torch.bfloat16
        return model.weight

    assert weights_after(torch.bfloat16) == weights_after(torch.float32) < 1.0


def test_the_learning_rate_and_frozen_weights_are_respected():
    model = Net()
    before = model.head.weight.detach().clone()
    model.head.weight.requires_grad_(False)
    optimizer = OptimConfig(name="sgd", learning_rate=1.0, master_weights=True).build(model)
    assert isinstance(optimizer, MasterWeights)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    inputs, targets = Batches().batch_at(0, 0)
    torch.nn.functional.cross_entropy(model(inputs).float(), targets).backward()
    optimizer.step()
    assert all(torch.equal(ours, was) for ours, was in zip(model.parameters(), weights))
    assert torch.equal(model.head.weight, before.bfloat16())
    assert model.head.weight not in optimizer.state


def test_on_tpu_a_step_is_one_program_that_leaves_nothing_to_the_cpu():
    torch.tpu.reset_fallback_stats()
    _, seen = train("tpu", 5)
    assert torch.tpu.fallback_stats() == {}
    assert [seen.records[step]["compilations"] for step in (4, 5)] == [0, 0]


def test_lora_learns_with_the_frozen_model_in_bfloat16(tmp_path):
    whole, seen = train("cpu", 4, tmp_path / "whole", model=small())
    assert {parameter.dtype for parameter in whole.model.parameters()} == {torch.bfloat16}
    masters = [name for name, p in whole.model.named_parameters() if p in whole.optimizer.state]
    assert masters
    assert all(name.endswith(("lora_a", "lora_b")) for name in masters)
    train("cpu", 2, tmp_path / "parts", model=small())
    _, again = train("cpu", 4, tmp_path / "parts", model=small())
    for step in (3, 4):
        assert again.records[step]["loss_hex"] == seen.records[step]["loss_hex"]


@pytest.mark.parametrize("optim", [{"ema_decay": 0.9}, {"name": "schedulefree"}])
def test_averages_of_weights_are_refused(optim):
    with pytest.raises(
        UserError,
        match=r"^optim\.master_weights=true: expected false with optim\.(ema_decay|name=schedulefree), ",
    ):
        OptimConfig(master_weights=True, **optim)


def test_a_checkpoint_without_masters_is_refused_in_one_line(tmp_path):
    train("cpu", 1, tmp_path, master_weights=False)
    with pytest.raises(UserError, match=r"state of AdamW, and this run's optimizer is MasterWeights of Adam"):
        train("cpu", 2, tmp_path)


def test_values_that_are_given_later_are_kept_in_float32() -> None:
    with parameters_on_meta():
        model = Llama(SMALL)
    cfg = RunConfig(device="cpu", optim=OptimConfig(master_weights=True), trainer=TrainerConfig(steps=1))
    trainer = Trainer(model, cfg, train_loader=Texts(), initialize=partial(initialize, seed=3))
    trainer._initial_values.give()
    for name, expected in small(lora=None).named_parameters():
        parameter = model.get_parameter(name)
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected.bfloat16()), name
        assert torch.equal(trainer.optimizer.state[parameter]["master"], expected), name
