"""Taking a checkpoint in: whose fault an error is, and state that only a user's own class has."""

import json

import pytest
import torch
from torch import nn

from tputrain import RunConfig, Trainer, TrainerConfig, UserError
from tputrain.callbacks.callback import Callback
from tputrain.snapshot import contents


def train(run_dir, steps, *callbacks, optimizer=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    cfg = RunConfig(run_dir=str(run_dir), device="cpu", trainer=TrainerConfig(steps=steps))
    data = [(torch.ones(2, 4), torch.tensor([0, 1]))]
    given = None if optimizer is None else optimizer(model.parameters(), lr=0.1)
    trainer = Trainer(model, cfg, train_loader=data, callbacks=callbacks, optimizer=given)
    trainer.fit()
    return trainer


class Counter(Callback):
    def state_dict(self):
        return {"count": 3}

    def load_state_dict(self, state):
        state["count"] + "text"


def test_an_error_of_the_user_s_own_code_is_not_blamed_on_the_checkpoint(tmp_path):
    train(tmp_path, 2, Counter())
    with pytest.raises(TypeError, match="unsupported operand") as caught:
        train(tmp_path, 3, Counter())
    assert caught.value.__notes__ == [f"while {tmp_path}/checkpoints/step-2 was loaded"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("RESOURCE_EXHAUSTED"),
        RuntimeError("Allocator: can't allocate memory"),
    ],
)
def test_a_lack_of_memory_is_not_blamed_on_the_checkpoint(tmp_path, monkeypatch, error):
    def load_model(model, path):
        raise error

    train(tmp_path, 2)
    monkeypatch.setattr(contents, "load_model", load_model)
    with pytest.raises(type(error)) as caught:
        train(tmp_path, 3)
    assert caught.value is error


def test_what_tputrain_would_not_have_written_is_blamed_on_the_checkpoint(tmp_path, monkeypatch):
    train(tmp_path, 2)
    written = contents.load_state
    monkeypatch.setattr(contents, "load_state", lambda path: written(path) | {"optimizer": 3})
    with pytest.raises(UserError, match=r"step-2: it holds what this tputrain does not write .*use another"):
        train(tmp_path, 3)


class Counting(torch.optim.SGD):
    """Keeps a tensor of its own by parameter, and numbers that belong to none."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["steps_taken"] = torch.zeros_like(parameter)
                state["steps_taken"].add_(1)
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1}


def test_a_subclass_of_an_optimizer_keeps_the_state_that_only_it_has(tmp_path):
    train(tmp_path, 2, optimizer=Counting)
    optimizer = train(tmp_path, 5, optimizer=Counting).optimizer
    weight = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[weight]["steps_taken"].tolist() == [[5.0] * 4] * 2
    assert optimizer.state["all"] == {"steps": 5}
    state = json.loads((tmp_path / "checkpoints/step-5/state.json").read_text())
    assert state["optimizer"]["own"] == {"all": {"steps": 5}}


class Hoarding(Counting):
    def step(self, closure=None):
        self.state["mean"] = torch.zeros(2)


def test_state_of_no_parameter_that_json_cannot_hold_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"Hoarding under 'mean', which is no parameter, is a Tensor"):
        train(tmp_path, 2, optimizer=Hoarding)
