"""Parameter groups and freezing by name, and clipping by value."""

from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from tputrain import GroupConfig, LogConfig, OptimConfig, RunConfig, Trainer, TrainerConfig, UserError
from tputrain.optim.clipping import clip_gradients
from tputrain.optim.groups import freeze, parameter_groups
from tputrain.optim.optimizer import other_rates, set_learning_rate
from tputrain.recipe import config_from_json, read_recipe


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return self.head(self.norm(hidden))


def settings_by_name(model: nn.Module, groups: list[dict]) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(p)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for p in group["params"]
    }


def test_learning_rates_of_groups_are_logged_where_they_differ():
    plain = OptimConfig(learning_rate=0.5).build(Net())
    assert len(plain.param_groups) == 2
    assert other_rates(plain) == {}
    scaled = [GroupConfig("layers.*", lr_scale=0.5)]
    optimizer = OptimConfig(learning_rate=0.5, groups=scaled).build(Net())
    set_learning_rate(optimizer, 0.4)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert 0.2 in rates[1:]
    assert other_rates(optimizer) == {f"learning_rate_group_{n}": rates[n] for n in range(1, len(rates))}


def test_groups_apply_by_name_and_later_ones_win():
    model = Net()
    groups = parameter_groups(
        model,
        0.1,
        [
            GroupConfig("layers.*", lr_scale=0.5),
            GroupConfig("layers.1.*", lr_scale=0.25, weight_decay=0.3),
            GroupConfig("embed.weight", weight_decay=0.0),
        ],
    )
    assert settings_by_name(model, groups) == {
        "embed.weight": (0.0, 1.0),
        "layers.0.weight": (0.1, 0.5),
        "layers.0.bias": (0.0, 0.5),
        "layers.1.weight": (0.3, 0.25),
        "layers.1.bias": (0.3, 0.25),
        "norm.weight": (0.0, 1.0),
        "norm.bias": (0.0, 1.0),
        "head.weight": (0.1, 1.0),
        "head.bias": (0.0, 1.0),
    }
    assert sum(len(group["params"]) for group in groups) == 9


def test_a_group_learns_at_its_share_of_the_rate():
    optimizer = OptimConfig(groups=[GroupConfig("head.*", lr_scale=0.1)]).build(Net())
    set_learning_rate(optimizer, 0.5)
    assert {group.get("lr_scale", 1.0): group["lr"] for group in optimizer.param_groups} == {
        1.0: 0.5,
        0.1: 0.05,
    }


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_what_is_frozen_or_has_no_rate_stays_and_the_rest_moves(device):
    model = Net()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optim = OptimConfig(freeze=["embed.*", "norm.*"], groups=[GroupConfig("head.bias", lr_scale=0.0)])
    cfg = RunConfig(
        device=device, optim=optim, trainer=TrainerConfig(steps=2), log=LogConfig(progress="none")
    )
    Trainer(model, cfg, train_loader=[(torch.arange(5), torch.tensor([0, 1, 2, 0, 1]))]).fit()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.detach().cpu(), before[name])}
    assert moved == {
        "layers.0.weight",
        "layers.0.bias",
        "layers.1.weight",
        "layers.1.bias",
        "head.weight",
    }


def test_a_pattern_that_matches_nothing_is_one_line_that_names_a_near_name():
    with pytest.raises(UserError, match=r"^optim\.groups\.match=embd\.weight: expected .*, such as embed"):
        parameter_groups(Net(), 0.1, [GroupConfig("embd.weight", weight_decay=0.0)])
    with pytest.raises(UserError, match=r"^optim\.freeze=layer\.\*: expected a pattern of names"):
        freeze(Net(), ["layer.*"])
    model = Net()
    freeze(model, ["*"])
    with pytest.raises(UserError, match="no parameter to train"):
        OptimConfig().build(model)


def test_groups_come_from_a_recipe_the_command_line_and_a_checkpoint(tmp_path: Path):
    path = tmp_path / "my.yaml"
    path.write_text(
        "optim:\n  freeze: [model.embed_tokens.*]\n  groups:\n    - {match: '*.bias', weight_decay: 0}\n"
    )
    cfg = read_recipe(path)
    assert cfg.optim.groups == [GroupConfig("*.bias", weight_decay=0.0)]
    assert cfg.optim.freeze == ["model.embed_tokens.*"]
    assert config_from_json(asdict(cfg), "state.json") == cfg
    changed = read_recipe(path, ["optim.groups=[{match: 'lm_head.*', lr_scale: 0.5}]"])
    assert changed.optim.groups == [GroupConfig("lm_head.*", lr_scale=0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("groups: [{mtch: x}]", "optim.groups[0].mtch: unknown key; nearest known key: match"),
        ("groups: [{match: x, lr_scale: -1}]", "optim.groups.lr_scale=-1.0: expected 0.0 or more"),
        ("groups: [{weight_decay: 1}]", "optim.groups.match='': expected a pattern of parameter names"),
        ("groups: [3]", "optim.groups[0]=3: expected {match, weight_decay, lr_scale}"),
        ("groups: [{match: [x]}]", "optim.groups[0].match=['x']: expected text"),
        ("groups: 3", "optim.groups=3: expected a list of {match, weight_decay, lr_scale}"),
        ("freeze: x", "optim.freeze='x': expected a list such as [a, b]"),
        ("ema_decay: 2.0", "optim.ema_decay=2.0: expected a number between 0 and 1, or null"),
    ],
)
def test_a_mistake_in_a_list_is_one_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "my.yaml"
    path.write_text(f"optim: {{{text}}}")
    with pytest.raises(UserError) as caught:
        read_recipe(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(("max_norm", "max_value"), [(None, None), (1.0, None), (None, 0.5), (0.1, 0.5)])
def test_clipping_bounds_values_then_the_norm_and_gives_the_norm_from_before(device, max_norm, max_value):
    parameters = [nn.Parameter(torch.zeros(3, device=device)), nn.Parameter(torch.zeros(1, device=device))]
    parameters[0].grad = torch.tensor([3.0, -4.0, 0.1]).to(device)
    parameters[1].grad = torch.tensor([12.0]).to(device)
    before = torch.tensor([3.0, -4.0, 0.1, 12.0])
    norm = clip_gradients(parameters, max_norm, max_value)
    expected = before if max_value is None else before.clamp(-max_value, max_value)
    if max_norm is not None:
        expected = expected * min(1.0, max_norm / (expected.norm().item() + 1e-6))
    torch.testing.assert_close(norm.cpu(), before.norm())
    torch.testing.assert_close(torch.cat([p.grad.cpu() for p in parameters]), expected)
