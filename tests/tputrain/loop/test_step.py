"""The step: how near the model is to the loop, and steps of one's own in its place."""

import inspect
import re
import sys
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain import (
    CheckpointConfig,
    JointOptimizer,
    LogConfig,
    RunConfig,
    Trainer,
    TrainerConfig,
    TrainStep,
    UserError,
)
from tputrain.loggers.jsonl import read_jsonl
from tputrain.loop import step as step_file
from tputrain.loop.step_parts import StepResult

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "steps.md").read_text()
SCRIPTS = dict(re.findall(r"^## ([\w ]+)\n.*?^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(inputs)))


class Batches:
    """By step; of `bad` steps (from 1) a value is not a number."""

    def __init__(self, *bad: int):
        self.bad = bad

    def batch_at(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(6, 4, generator=generator)
        if step + 1 in self.bad:
            inputs[0, 0] = torch.nan
        return [inputs, torch.randint(3, (6,), generator=generator)]


def trainer_of(run_dir: Path | None, step: Any, steps: int = 6, device: str = "cpu", **more: Any) -> Trainer:
    cfg = RunConfig(
        device=device,
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(steps=steps, **more),
        checkpoint=CheckpointConfig(every=2, keep_last=9),
        log=LogConfig(every=2, progress="none"),
    )
    model = Net().to(device)
    optimizer = JointOptimizer(
        torch.optim.AdamW(model.body.parameters(), lr=0.01),
        torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9),
    )
    bad = (3,) if more.get("on_nonfinite") == "skip" else ()
    return Trainer(model, cfg, train_loader=Batches(*bad), optimizer=optimizer, step=step)


def losses(run_dir: Path) -> list[str]:
    return [record["loss_hex"] for record in read_jsonl(run_dir / "metrics.jsonl")]


def test_the_step_is_short_and_at_most_four_frames_lie_between_the_loop_and_the_model():
    assert len(inspect.getsource(step_file).splitlines()) < 150
    found: list[list[str]] = []

    class Seen(Net):
        def forward(self, inputs: Tensor) -> Tensor:
            frame, names = sys._getframe(1), []
            while frame is not None and frame.f_code is not Trainer.fit.__code__:
                if "/tputrain/" in frame.f_code.co_filename:
                    names.append(frame.f_code.co_name)
                frame = frame.f_back
            assert frame is not None
            found.append(names[::-1])
            return super().forward(inputs)

    cfg = RunConfig(device="cpu", trainer=TrainerConfig(steps=3), log=LogConfig(progress="none"))
    Trainer(Seen(), cfg, train_loader=Batches()).fit()
    assert found[-1] == ["__call__", "update", "gradients", "forward"]


class EveryOther(TrainStep):
    """The second optimizer steps every other time."""

    num_taken = 0

    def optimizer_step(self) -> None:
        body, head = self.optimizer.parts
        self.num_taken += 1
        body.step()
        if self.num_taken % 2 == 0:
            head.step()

    def state_dict(self) -> dict[str, Any]:
        return {"num_taken": self.num_taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_taken = state["num_taken"]


def test_two_optimizers_take_the_steps_of_a_loop_by_hand_and_resume_to_the_bit(tmp_path):
    trainer_of(tmp_path / "parts", EveryOther, steps=3).fit()
    resumed = trainer_of(tmp_path / "parts", EveryOther)
    resumed.fit()

    model, expected = Net(), []
    body = torch.optim.AdamW(model.body.parameters(), lr=0.01)
    head = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for number in range(6):
        inputs, labels = Batches().batch_at(number, 0)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        body.step()
        if number % 2 == 1:
            head.step()
        model.zero_grad()
        expected.append(loss.item().hex())
    assert losses(tmp_path / "parts") == expected
    for ours, theirs in zip(resumed.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_bad_step_of_several_optimizers_is_left_out_as_a_whole(tmp_path, device):
    trainer = trainer_of(tmp_path, EveryOther, steps=3, device=device, on_nonfinite="skip")
    before: dict[str, Tensor] = {}
    taken = type(trainer.train_step).gradients

    def remembered(self: TrainStep, *arguments: Any) -> Any:
        before.update({name: value.cpu().clone() for name, value in self.model.state_dict().items()})
        return taken(self, *arguments)

    EveryOther.gradients = remembered
    try:
        trainer.fit()
    finally:
        del EveryOther.gradients
    assert (tmp_path / "nonfinite" / "step-3").exists()
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name


class Whole(TrainStep):
    def update(self, batches: list[Any], shares: list[float]) -> StepResult:
        result = super().update(batches, shares)
        return StepResult(result.loss * 2, result.grad_norm)


def test_an_update_of_ones_own_is_used_and_is_refused_where_it_could_not_be_left_out(tmp_path):
    for name, step in (("plain", TrainStep), ("whole", Whole)):
        trainer_of(tmp_path / name, step, steps=2).fit()
    plain, whole = ([float.fromhex(each) for each in losses(tmp_path / name)] for name in ("plain", "whole"))
    assert whole == [2 * loss for loss in plain]
    with pytest.raises(UserError, match=r"^trainer.on_nonfinite=skip: Whole has an update\(\) of its own"):
        trainer_of(None, Whole, on_nonfinite="skip")
    with pytest.raises(UserError, match=r"^Trainer: step returned a dict: expected a tputrain\.Tr"):
        trainer_of(None, lambda parts: {})
    with pytest.raises(UserError, match=r"^Trainer: step is 3: expected a subclass of tputrain.TrainStep"):
        trainer_of(None, 3)


@pytest.mark.parametrize(
    ("name", "falls"),
    [
        ("A loss without a target", True),
        ("Two optimizers", True),
        ("A GAN", False),
        ("Distillation", True),
    ],
)
def test_the_scripts_of_the_page_run_as_they_stand(name, falls, tmp_path):
    with chdir(tmp_path):
        exec(compile(SCRIPTS[name], str(ROOT / "docs" / "steps.md"), "exec"), {"__name__": "script"})
        (run_dir,) = (tmp_path / "runs").iterdir()
    found = [float.fromhex(each) for each in losses(run_dir)]
    assert all(torch.isfinite(torch.tensor(found)))
    assert found[-1] < found[0] * 0.8 or not falls
    assert (run_dir / "checkpoints" / f"step-{len(found)}").is_dir()


def test_the_page_names_what_may_be_overridden():
    rows = re.findall(r"^\| (`.*?) \|", PAGE, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)\(", row)]
    assert all(hasattr(TrainStep, name) for name in named)
    assert set(named) >= {"forward", "gradients", "optimizer_step", "update", "state_dict"}
