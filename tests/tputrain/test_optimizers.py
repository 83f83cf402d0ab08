"""Every optimizer by name: it learns, resumes to the last bit, reads nothing and compiles nothing anew."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
from tputrain.loggers.logger import Logger
from tputrain.loop.step import TrainStep
from tputrain.loop.step_parts import StepResult
from tputrain.optim.adafactor import Adafactor
from tputrain.optim.config import AdamWConfig
from tputrain.optim.muon import MuonWithAdamW

RATES = {"sgd": 0.05, "adafactor": 0.03}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.second(torch.tanh(self.first(self.embed(inputs))))))


class Batches:
    """Batches by step: the same in every process."""

    def batch_at(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = torch.randint(7, (12,), generator=torch.Generator().manual_seed(step))
        return inputs, inputs % 3


class Steps(Logger):
    def __init__(self) -> None:
        self.records: dict[int, dict] = {}

    def log(self, records):
        self.records |= {record["step"]: record for record in records}


def train(
    name: str, device: str, steps: int, run_dir: Path | None = None, **optim: object
) -> tuple[Trainer, Steps]:
    cfg = RunConfig(
        device=device,
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(steps=steps, evaluate_every=3),
        optim=OptimConfig(name=name, learning_rate=RATES.get(name, 0.01), **optim),  # type: ignore[arg-type]
        schedule=ScheduleConfig(name="constant", warmup_steps=2),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=100, progress="none"),
    )
    steps_seen = Steps()
    evaluation = [Batches().batch_at(1000, 0)]
    trainer = Trainer(Net(), cfg, train_loader=Batches(), val_loader=evaluation, loggers=[steps_seen])
    trainer.fit()
    return trainer, steps_seen


VARIANTS = [
    *((name, {}) for name in OptimConfig.kinds),
    ("adamw", {"ema_decay": 0.9}),
    ("adamw", {"mean_dtype": "bfloat16"}),
    ("adamw", {"mean_dtype": "bfloat16", "squares_dtype": "bfloat16"}),
]
named = pytest.mark.parametrize(
    ("name", "optim"), VARIANTS, ids=["-".join([name, *optim]) for name, optim in VARIANTS]
)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@named
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(name, optim, device, tmp_path):
    whole, seen = train(name, device, 9, tmp_path / "whole", **optim)
    assert seen.records[9]["loss"] < seen.records[1]["loss"]
    train(name, device, 4, tmp_path / "parts", **optim)
    parts, again = train(name, device, 9, tmp_path / "parts", **optim)
    assert sorted(again.records) == [5, 6, 7, 8, 9]
    for step, record in again.records.items():
        assert record["loss_hex"] == seen.records[step]["loss_hex"], step
    for (where, ours), theirs in zip(parts.model.named_parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs), where
    assert parts.validate()["loss"] == whole.validate()["loss"]


@named
def test_on_tpu_a_step_is_one_program_that_is_compiled_early_and_reads_and_leaves_nothing(
    name, optim, monkeypatch
):
    changes: list[tuple[int, ...]] = []
    take_step = TrainStep.__call__

    def counted(self: TrainStep, *arguments, **named) -> StepResult:
        before = torch.tpu.compile_stats()
        result = take_step(self, *arguments, **named)
        after = torch.tpu.compile_stats()
        changes.append(tuple(after[name] - before[name] for name in ("segments_run", "host_reads")))
        return result

    monkeypatch.setattr(TrainStep, "__call__", counted)
    torch.tpu.reset_fallback_stats()
    _, seen = train(name, "tpu", 6, **optim)
    assert torch.tpu.fallback_stats() == {}
    assert changes[2:] == [(1, 0)] * 4
    assert [num_reads for _, num_reads in changes] == [0] * 6
    assert [seen.records[step]["compilations"] for step in range(4, 7)] == [0] * 3


def gradients(model: nn.Module) -> None:
    inputs, targets = Batches().batch_at(3, 0)
    F.cross_entropy(model(inputs), targets).backward()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adafactor_takes_the_steps_of_torchs(weight_decay):
    ours, theirs = Net(), Net()
    optimizers = [
        kind(model.parameters(), lr=0.05, weight_decay=weight_decay)
        for kind, model in ((Adafactor, ours), (torch.optim.Adafactor, theirs))
    ]
    for _ in range(5):
        for model, optimizer in zip((ours, theirs), optimizers):
            gradients(model)
            optimizer.step()
            optimizer.zero_grad()
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(ours_now, theirs_now, rtol=1e-5, atol=1e-6)
    described = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for number, state in described[1].items():
        assert described[0][number].keys() == {key for key, value in state.items() if value is not None}


def drawn_gradients(step: int, shapes: list[torch.Size]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in shapes]


KEYS = {"mean_dtype": "exp_avg", "squares_dtype": "exp_avg_sq"}
rounding = pytest.mark.parametrize("settings", [["mean_dtype"], ["squares_dtype"], [*KEYS]], ids="-".join)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@rounding
def test_rounded_moments_are_adamws_rounded_after_each_step(device, settings):
    models = [Net().to(device) for _ in range(2)]
    ours = AdamWConfig(**dict.fromkeys(settings, "bfloat16")).build(models[0])
    theirs = AdamWConfig().build(models[1])
    keys = [KEYS[setting] for setting in settings]
    for step in range(5):
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            given = drawn_gradients(step, [each.shape for each in model.parameters()])
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                parameter.grad = gradient.to(device)
            optimizer.step()
        for state in theirs.state.values():
            state.update({key: state[key].bfloat16().float() for key in keys})
    for mine, reference in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-6, atol=1e-7)
        for key in KEYS.values():
            found, expected = ours.state[mine][key], theirs.state[reference][key]
            assert found.dtype == (torch.bfloat16 if key in keys else torch.float32)
            if key in keys:
                assert torch.equal(found.float().cpu(), expected.cpu())


@rounding
def test_a_run_may_go_on_with_rounded_moments_and_without(settings, tmp_path):
    def dtypes(trainer: Trainer) -> set[torch.dtype]:
        states = trainer.optimizer.state.values()
        return {state[KEYS[setting]].dtype for state in states for setting in settings}

    train("adamw", "cpu", 4, tmp_path)
    assert dtypes(train("adamw", "cpu", 6, tmp_path, **dict.fromkeys(settings, "bfloat16"))[0]) == {
        torch.bfloat16
    }
    assert dtypes(train("adamw", "cpu", 8, tmp_path)[0]) == {torch.float32}


def test_moments_in_bfloat16_learn_as_in_float32_and_squares_can_fall():
    exact, _ = train("adamw", "cpu", 60)
    rounded, _ = train("adamw", "cpu", 60, **dict.fromkeys(KEYS, "bfloat16"))
    loss = exact.validate()["loss"]
    assert rounded.validate()["loss"] == pytest.approx(loss, rel=0.02)
    model = nn.Linear(1, 1)
    optimizer = AdamWConfig(squares_dtype="bfloat16", beta2=0.99).build(model)
    for size in (1.0, *[0.01] * 600):
        model.weight.grad = torch.full_like(model.weight, size)
        optimizer.step()
    # 0.99 ** 600 of 0.01 is left, and what rounds to no change: a fall of 1 % is within half a unit.
    assert optimizer.state[model.weight]["exp_avg_sq"].item() < 4e-4


def test_squares_that_could_not_fall_in_bfloat16_are_refused():
    with pytest.raises(
        UserError, match=r"^optim\.beta2=0\.999: expected at most 0\.99 with optim\.squares_dtype=bfloat16,"
    ):
        OptimConfig(squares_dtype="bfloat16", beta2=0.999)
    assert [
        OptimConfig(**dict.fromkeys(settings, "bfloat16")).state_bytes
        for settings in ([], ["mean_dtype"], ["squares_dtype"], [*KEYS])
    ] == [8.0, 6.0, 6.0, 4.0]


def test_muon_takes_hidden_matrices_and_adamw_the_rest():
    ours, theirs = Net(), Net()
    optimizer = OptimConfig(name="muon", learning_rate=0.02, momentum=0.95).build(ours)
    assert isinstance(optimizer, MuonWithAdamW)
    names = {id(parameter): name for name, parameter in ours.named_parameters()}
    muon, adamw = [
        {names[id(p)] for group in part.param_groups for p in group["params"]} for part in optimizer.parts
    ]
    assert muon == {"first.weight", "second.weight"}
    assert adamw == set(names.values()) - muon

    hidden = [theirs.first.weight, theirs.second.weight]
    matrices = [theirs.embed.weight, theirs.head.weight]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    separate = [
        torch.optim.Muon(hidden, lr=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
            lr=0.02,
            betas=(0.9, 0.95),
        ),
    ]
    for _ in range(4):
        gradients(ours)
        gradients(theirs)
        for each in [optimizer, *separate]:
            each.step()
            each.zero_grad()
    for ours_now, theirs_now in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(ours_now, theirs_now)


def test_muon_without_a_hidden_matrix_is_refused():
    with pytest.raises(UserError, match=r"^optim\.name=muon: expected a model with trainable matrices"):
        OptimConfig(name="muon").build(nn.Linear(3, 2))


def test_schedule_free_takes_no_decaying_schedule_and_no_ema():
    optim = OptimConfig(name="schedulefree")
    with pytest.raises(UserError, match=r"^schedule\.name=cosine: expected constant with optim.name=schedu"):
        RunConfig(optim=optim)
    with pytest.raises(UserError, match=r"^optim\.ema_decay=0\.9: expected null with optim.name=sched"):
        OptimConfig(name="schedulefree", ema_decay=0.9)


def test_schedule_free_without_its_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "schedulefree", None)
    with pytest.raises(UserError, match=r"pip install 'tputrain\[schedulefree\]'"):
        OptimConfig(name="schedulefree").build(Net())
