"""The learning rate finder: what it suggests, what it writes, and that it leaves a run alone."""

import json
import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from tputrain import LogConfig, RunConfig, TrainerConfig, TrainStep, UserError
from tputrain.cli import main
from tputrain.lr_finder import Sweep, find_learning_rate
from tputrain.lr_sweep import SweepConfig


def a_sweep() -> Sweep:
    """Losses that fall fastest around 1e-3, are lowest at 1e-2, and rise from there on."""
    rates = [10 ** (-6 + 6 * step / 99) for step in range(100)]
    falling = [8.0 - 4.0 / (1.0 + math.exp(-4.0 * (math.log10(rate) + 3.0))) for rate in rates]
    return Sweep(rates, [loss + max(0.0, math.log10(rate) + 2.0) * 4 for rate, loss in zip(rates, falling)])


def test_it_suggests_where_the_loss_falls_fastest_which_is_below_where_it_is_lowest():
    sweep = a_sweep()
    assert 5e-4 < sweep.suggested < 4e-3
    assert sweep.suggested < sweep.at_lowest_loss < 4e-2


def test_a_loss_that_never_falls_suggests_nothing():
    with pytest.raises(UserError, match=r"^the loss never fell: expected it to"):
        _ = Sweep(
            [10.0**-place for place in range(30, 0, -1)], [float(place) for place in range(30)]
        ).suggested


def test_rates_grow_by_the_same_factor_from_the_lowest_to_the_highest():
    sweep = SweepConfig(1e-4, 1.0, 41)
    assert sweep.rate(0) == pytest.approx(1e-4)
    assert sweep.rate(20) == pytest.approx(1e-2)
    assert sweep.rate(40) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lowest": 0.0}, r"^--lowest=0\.0: expected a number above 0"),
        ({"lowest": 2.0}, r"^--highest=1\.0: expected more than --lowest=2"),
        ({"highest": math.inf}, r"^--highest=inf: expected a finite number"),
        ({"steps": 5}, r"^--steps=5: expected 20 or more"),
    ],
)
def test_a_mistake_in_a_sweep_is_one_line(fields, message):
    with pytest.raises(UserError, match=message):
        SweepConfig(**fields)


class Explodes(nn.Module):
    """Its loss is not a number any more once the weight has moved far."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(self.weight) * x.mean()


def test_a_sweep_ends_where_the_loss_is_no_number_any_more():
    cfg = RunConfig(device="cpu", log=LogConfig(progress="none"))
    sweep = find_learning_rate(Explodes(), cfg, [torch.ones(3)], sweep=SweepConfig(1e-3, 10.0, 60))
    assert 10 < len(sweep.losses) < 60
    assert all(math.isfinite(loss) for loss in sweep.losses)


def test_a_sweep_takes_all_of_its_steps_with_a_step_of_ones_own():
    class Counted(TrainStep):
        num_taken = 0

        def optimizer_step(self) -> None:
            Counted.num_taken += 1
            super().optimizer_step()

    trainer = TrainerConfig(duration="1ep")  # of one batch, which a sweep does not count
    cfg = RunConfig(device="cpu", trainer=trainer, log=LogConfig(progress="none"))
    sweep = find_learning_rate(
        Explodes(), cfg, [torch.ones(3)], sweep=SweepConfig(1e-6, 1e-3, 20), step=Counted
    )
    assert len(sweep.losses) == Counted.num_taken == 20


@pytest.mark.parametrize(
    ("num_rates", "steps", "said"),
    [
        (100, 100, r"lowest at learning rate 1\.\de-02 and rose after it: too high to train with"),
        (50, 100, "lowest at learning rate 9.3e-04 and not finite after it: too high to train with"),
        (50, 50, "still fell at learning rate 9.3e-04, the last one: --highest may be larger"),
    ],
)
def test_the_command_tells_a_loss_that_rose_from_one_that_still_falls(
    num_rates, steps, said, tmp_path, monkeypatch, capsys
):
    whole = a_sweep()
    found = Sweep(whole.rates[:num_rates], whole.losses[:num_rates])
    monkeypatch.setattr("tputrain.cli.lr_find.build_sweep", lambda cfg, chosen: found)
    assert main(["lr-find", "digits", f"run_dir={tmp_path}", "--steps", str(steps)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.search(said, lines[-3])
    assert lines[-2].endswith(f"try optim.learning_rate={found.suggested:.1e} or less")


def test_the_command_writes_its_findings_into_the_run_directory_and_changes_nothing_there(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    small = ["device=cpu", "log.progress=none", "model.num_hidden_layers=1", "batch.samples=32"]
    assert main(["run", "digits", *small, "trainer.steps=2"]) == 0
    before = {path: path.read_bytes() for path in Path("runs/digits").rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["lr-find", "digits", *small, "--lowest", "1e-5", "--steps", "60"]) == 0
    after = {path: path.read_bytes() for path in Path("runs/digits").rglob("*") if path.is_file()}
    found = {path.name for path in after.keys() - before.keys()}
    assert found == {"lr-find.json", "lr-find.svg"}
    assert {path: after[path] for path in before} == before
    kept = json.loads(Path("runs/digits/lr-find.json").read_text())
    assert 1e-4 < kept["suggested"] < 1e-1
    assert len(kept["rates"]) == len(kept["losses"]) == len(kept["smoothed"])
    assert f"optim.learning_rate={kept['suggested']:.1e}" in capsys.readouterr().out
    picture = ElementTree.parse("runs/digits/lr-find.svg").getroot()
    assert any(node.tag.endswith("polyline") for node in picture.iter())
