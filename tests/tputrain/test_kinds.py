"""Families of configurations: one dataclass a kind, chosen by name."""

import copy
import json
import pickle
import sys
from dataclasses import InitVar, asdict, dataclass, replace
from pathlib import Path

import pytest

from tputrain import OptimConfig, RunConfig, ScheduleConfig, TrainerConfig, UserError
from tputrain.config_differences import changed_settings
from tputrain.data import DataConfig
from tputrain.models import ModelConfig
from tputrain.optim.config import AdamWConfig, SgdConfig
from tputrain.recipe import RecipeConfig, config_from_json, read_recipe
from tputrain.shipped import find_recipe

LLAMA = "include: [optim/adamw]\noptim: {beta2: 0.99}\nschedule: {name: wsd, decay_fraction: 0.5}"


def load(tmp_path: Path, text: str, *overrides: str) -> RecipeConfig:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return read_recipe(path, overrides)


def test_a_family_makes_the_kind_that_is_named():
    assert type(OptimConfig()) is AdamWConfig
    assert OptimConfig(name="sgd", momentum=0.5) == SgdConfig(momentum=0.5)
    assert ScheduleConfig("wsd", decay_fraction=0.5).decay_fraction == 0.5
    sgd = SgdConfig(learning_rate=0.5)
    assert replace(sgd, momentum=0.1) == SgdConfig(learning_rate=0.5, momentum=0.1)
    assert pickle.loads(pickle.dumps(sgd)) == copy.deepcopy(sgd) == sgd


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adam"}, r"^optim\.name=adam: expected one of adamw, sgd, .*; did you mean adamw\?$"),
        ({"name": 3}, r"^optim\.name=3: expected one of adamw, "),
        (
            {"name": "sgd", "beta1": 0.5},
            r"^optim\.beta1=0\.5: expected nothing with optim\.name=sgd; it is a ",
        ),
        ({"momentum": 0.5}, r"^optim\.momentum=0\.5: .* optim\.name=adamw; it is a setting of sgd, muon$"),
    ],
)
def test_an_unknown_kind_and_a_setting_of_another_one_are_refused_in_one_line(settings, message):
    with pytest.raises(UserError, match=message):
        OptimConfig(**settings)
    with pytest.raises(UserError, match=r"^optim\.name=adamw: expected another class than SgdConfig$"):
        SgdConfig(name="adamw")


def test_a_setting_of_another_kind_is_refused_where_the_kind_is_named_and_above(tmp_path):
    foreign = "expected nothing with optim.name=sgd; it is a setting of adamw, muon, schedulefree"
    with pytest.raises(UserError, match=rf"my\.yaml: optim\.beta2=0\.9: {foreign}"):
        load(tmp_path, "optim: {name: sgd, beta2: 0.9}")
    with pytest.raises(UserError, match=rf"^command line: optim\.beta2=0\.9: {foreign}"):
        load(tmp_path, "optim: {name: sgd}", "optim.beta2=0.9")
    for overrides in (("optim.name=sgd", "optim.beta2=0.9"), ("optim.beta2=0.9", "optim.name=sgd")):
        with pytest.raises(UserError, match=rf"^command line: optim\.beta2=0\.9: {foreign}"):
            load(tmp_path, LLAMA, *overrides)


def test_a_kind_may_be_named_by_an_interpolation(tmp_path, monkeypatch):
    monkeypatch.setenv("OPTIMIZER", "sgd")
    named = "optim: {name: '${oc.env:OPTIMIZER}', momentum: 0.8}"
    assert load(tmp_path, named).optim == SgdConfig(momentum=0.8)
    assert load(tmp_path, "run_dir: wsd\nschedule: {name: '${run_dir}'}").schedule.name == "wsd"
    assert load(tmp_path, LLAMA, "optim.name=${oc.env:OPTIMIZER}").optim == SgdConfig()
    monkeypatch.setenv("OPTIMIZER", "sdg")
    with pytest.raises(UserError, match=r"my\.yaml: optim\.name=sdg: expected one of .*; did you mean sgd"):
        load(tmp_path, named)
    monkeypatch.delenv("OPTIMIZER")
    with pytest.raises(UserError, match=r"my\.yaml: optim\.name=\$\{oc\.env:OPTIMIZER\}: .*'OPTIMIZER'"):
        load(tmp_path, named)


def test_another_kind_leaves_the_settings_of_the_one_below_it_behind(tmp_path):
    cfg = load(tmp_path, LLAMA, "optim.name=sgd", "optim.momentum=0.8", "schedule.name=constant")
    assert (cfg.optim, cfg.schedule) == (SgdConfig(momentum=0.8), ScheduleConfig("constant"))
    assert load(tmp_path, LLAMA, "optim.name=muon").optim == OptimConfig(name="muon", beta2=0.99)


DATA = [
    {"source": "text", "files": "*.txt", "tokenizer": "runs/llama"},
    {"source": "jsonl", "files": "*.jsonl", "validation_files": "other.jsonl"},
    {"source": "saved", "name": "saved"},
    {"source": "hub", "name": "nobody/nothing", "tokenizer": "nobody/nothing"},
    {"source": "docstrings"},
    {"source": "digits"},
]
MODELS = [
    {"path": "runs/llama"},
    {"name": "huggingface", "path": "."},
    {"name": "huggingface", "path": "a/b"},
]

STORED = json.loads(Path(__file__).with_name("stored_before_kinds.json").read_text())
"""What runs of the shipped recipes wrote before kinds had settings of their own."""


@pytest.mark.parametrize("recipe", STORED)
def test_a_run_begun_before_kinds_is_the_same_run_now(recipe):
    cfg = read_recipe(find_recipe(recipe))
    assert config_from_json(STORED[recipe], "state.json") == cfg
    assert changed_settings(STORED[recipe], cfg) == {}


def test_what_a_run_wrote_before_kinds_had_settings_of_their_own_is_read_and_unchanged():
    flat = {"name": "sgd", "momentum": 0.5, "beta1": 0.7, "beta2": 0.95, "eps": 1e-8}
    stored = json.loads(json.dumps(asdict(RecipeConfig()) | {"optim": flat}))
    stored["schedule"] |= {"decay_fraction": 0.3}
    cfg = config_from_json(stored, "state.json")
    assert cfg.optim == SgdConfig(momentum=0.5)
    assert changed_settings(stored, cfg) == {}
    assert config_from_json(asdict(cfg), "state.json") == cfg
    other = config_from_json(stored, "state.json", ["optim.name=adamw", "schedule.name=constant"])
    assert changed_settings(stored, other) == {
        "optim.name": ("sgd", "adamw"),
        "schedule.name": ("cosine", "constant"),
    }
    del stored["optim"]["name"]
    assert "optim.name" in changed_settings(stored, cfg)


def test_making_a_configuration_touches_neither_disk_nor_network(monkeypatch):
    """`stat` is no audited event, so it is watched by itself."""
    watched: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event.startswith(("open", "os.listdir", "os.scandir", "socket.")):
            watched.append(f"{event} {arguments[0]}")

    monkeypatch.setattr("os.stat", lambda path, **_: watched.append(f"stat {path}"))
    watching = False
    sys.addaudithook(hook)
    watching = True
    try:
        for settings in DATA:
            DataConfig(**settings)
        for settings in MODELS:
            RecipeConfig(model=ModelConfig(**settings))
    finally:
        watching = False
    assert watched == []


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (RunConfig, {"run_dirr": "runs/mine"}, r"^RunConfig: run_dirr: no such .*; did you mean run_dir\?$"),
        (OptimConfig, {"bet1": 0.9}, r"^AdamWConfig: bet1: no such setting; .*; did you mean beta1\?$"),
        (
            TrainerConfig,
            {"learning": 1},
            r"^TrainerConfig: learning: no such .*; it has steps, .*every$",
        ),
    ],
)
def test_a_setting_misspelt_in_python_is_named_with_the_nearest(kind, settings, message):
    with pytest.raises(UserError, match=message):
        kind(**settings)


def test_a_subclass_of_settings_may_take_others():
    @dataclass(frozen=True)
    class Named(RunConfig):
        name: InitVar[str] = ""

        def __post_init__(self, name: str) -> None:
            super().__post_init__()

    class Free(RunConfig):
        def __init__(self, name: str, **settings):
            super().__init__(**settings)

    assert Named(name="a", seed=3).seed == Free("a", seed=3).seed == 3
    with pytest.raises(UserError, match=r"^Named: sed: no such setting; .*; did you mean seed"):
        Named(name="a", sed=3)
