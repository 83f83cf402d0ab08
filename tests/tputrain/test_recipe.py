"""Recipes: what they resolve to, and what is said about every mistake in one."""

import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tputrain import OptimConfig
from tputrain.config import RunConfig
from tputrain.config_differences import changed_settings
from tputrain.data import DataConfig
from tputrain.errors import UserError
from tputrain.recipe import RecipeConfig, _known_of_any_kind, config_from_json, read_recipe
from tputrain.recipe_keys import ANY_BELOW
from tputrain.shipped import find_recipe, shipped_names, shipped_path

RESOLVED = Path(__file__).with_name("resolved_recipes")
"""What each shipped recipe resolves to."""

RENEW = "if this is meant: PYTHONPATH=backend:. python -m tests.tputrain.test_recipe"
ROOT = Path(__file__).resolve().parents[2]
KNOWN_KEYS = ROOT / "tputrain" / "known_keys.txt"


def load(tmp_path: Path, text: str, *overrides: str) -> RecipeConfig:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    return read_recipe(path, overrides)


def test_what_a_recipe_does_not_say_is_the_default(tmp_path):
    assert load(tmp_path, "seed: 0\n") == RecipeConfig()
    assert load(tmp_path, "{}") == RecipeConfig()


def test_later_wins_defaults_then_includes_then_the_recipe_then_the_command_line(tmp_path):
    (tmp_path / "first.yaml").write_text("optim: {learning_rate: 1.0, beta1: 0.1, beta2: 0.1, eps: 0.1}")
    (tmp_path / "second.yaml").write_text("optim: {beta1: 0.2, beta2: 0.2, eps: 0.2}")
    text = "include: [first, second]\noptim: {beta2: 0.3, eps: 0.3}"
    optim = load(tmp_path, text, "optim.eps=0.4").optim
    assert (optim.learning_rate, optim.beta1, optim.beta2, optim.eps) == (1.0, 0.2, 0.3, 0.4)


def test_overrides_are_read_as_yaml_and_as_text_where_they_are_none(tmp_path):
    cfg = load(
        tmp_path,
        "{}",
        "optim.learning_rate=1e-3",
        "trainer.max_grad_norm=null",
        "data.files=*.txt",
        "run_dir=a=b",
        "sample.prompt=def main(): ",
    )
    assert cfg.optim.learning_rate == 0.001
    assert cfg.trainer.max_grad_norm is None
    assert (cfg.data.files, cfg.run_dir, cfg.sample.prompt) == ("*.txt", "a=b", "def main(): ")


def test_settings_of_a_model_elsewhere_are_taken_as_they_are_and_later_ones_win(tmp_path):
    text = "model: {name: huggingface, config: {model_type: gpt2, n_embd: 8, task: {x: [1, 2]}}}"
    config = load(tmp_path, text, "model.config.n_embd=16", "model.config.n_layer=2").model.config
    assert config == {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "task": {"x": [1, 2]}}


def test_accumulation_follows_from_the_tokens_of_a_batch(tmp_path):
    cfg = load(tmp_path, "batch: {tokens: 4096, sequences: 8}\ndata: {sequence_length: 128}")
    assert cfg.trainer.accumulate == 4
    assert cfg.batch.arithmetic(128) == (
        "batch: 4,096 tokens a step = 8 sequences x 128 tokens x 4 micro-batches"
    )


def test_a_config_survives_json(tmp_path):
    cfg = load(
        tmp_path, "trainer: {max_grad_norm: null}\nmodel: {num_hidden_layers: 2}\nbatch: {tokens: 2048}"
    )
    assert config_from_json(asdict(cfg), "state.json") == cfg
    assert config_from_json(asdict(cfg), "state.json", ["device=cpu"]).device == "cpu"


def test_differences_are_named_by_dotted_key():
    old = asdict(RecipeConfig())
    assert changed_settings(old, RecipeConfig(seed=4, optim=OptimConfig(eps=1.0))) == {
        "seed": (0, 4),
        "optim.eps": (1e-8, 1.0),
    }


def test_a_key_that_an_older_run_did_not_know_had_its_default():
    new = asdict(RecipeConfig(seed=4))
    old = {name: dict(value) if isinstance(value, dict) else value for name, value in new.items()}
    del old["model"]["rope_theta"], old["data"]["validation_fraction"], old["sample"]
    assert changed_settings(old, RecipeConfig(seed=4)) == {}
    changed = RecipeConfig(seed=4, data=DataConfig(validation_fraction=0.2))
    assert changed_settings(old, changed) == {"data.validation_fraction": (0.05, 0.2)}
    assert changed_settings(old, RunConfig(seed=5)) == {"seed": (4, 5)}


MISTAKES = [
    (
        "optim: {learing_rate: 0.1}",
        "optim.learing_rate=0.1: unknown key; nearest known key: optim.learning_rate",
    ),
    ("learning_rate: 0.1", "learning_rate=0.1: unknown key; nearest known key: optim.learning_rate"),
    (
        "loggers: {wandb: 1}",
        "loggers.wandb=1: unknown key; nearest known key: log.wandb",
    ),
    (
        "zzzqqq: {zzz: 1}",
        "zzzqqq.zzz=1: unknown key; nearest known key: none resembles it (known keys: seed, device, ",
    ),
    ("steps: 5", "steps=5: unknown key; nearest known key: trainer.steps or schedule.steps"),
    ("zzzqqq: 1", "zzzqqq=1: unknown key; nearest known key: none resembles it"),
    ("lr: 0.1", "lr=0.1: unknown key; nearest known key: optim.learning_rate"),
    ("optim: {lr: 0.1}", "optim.lr=0.1: unknown key; nearest known key: optim.learning_rate"),
    (
        "trainer: {warmup_steps: 1}",
        "trainer.warmup_steps=1: unknown key; nearest known key: schedule.warmup_steps",
    ),
    ("trianer: {steps: 1}", "trianer.steps=1: unknown key; nearest known key: trainer.steps"),
    (
        "lora: {zzz: 1}",
        "lora.zzz=1: unknown key; nearest known key: none resembles it (known below lora: rank, ",
    ),
    ("optim: {betas: {x: 1}}", "optim.betas.x=1: unknown key"),
    ("trainer: {steps: many}", "trainer.steps='many': expected a whole number"),
    ("trainer: {steps: 1.5}", "trainer.steps=1.5: expected a whole number"),
    ("trainer: {steps: true}", "trainer.steps=true: expected a whole number"),
    ("trainer: {steps: null}", "trainer.steps=null: expected a whole number"),
    ("trainer: {steps: [1, 2]}", "trainer.steps=[1, 2]: expected a whole number"),
    ("trainer: {steps: {a: 1}}", "trainer.steps.a=1: unknown key; nearest known key: trainer.steps"),
    ("trainer: {steps: -3}", "trainer.steps=-3: expected 1 or more"),
    ("trainer: {max_grad_norm: x}", "trainer.max_grad_norm='x': expected a number or null"),
    ("trainer: 3", "trainer=3: expected keys below it, such as trainer.steps"),
    ("trainer:", "trainer=null: expected keys below it, such as trainer.steps"),
    ("optim: {learning_rate: .nan}", "optim.learning_rate=nan: expected a number above 0"),
    ("optim: {beta1: 1.0}", "optim.beta1=1.0: expected a number below 1"),
    (
        "optim: {name: adam}",
        "optim.name=adam: expected one of adamw, sgd, adafactor, muon, schedulefree; did",
    ),
    ("device: cpuu", "device=cpuu: expected one of auto, tpu, cpu; did you mean cpu?"),
    (
        "device: cuda",
        "device=cuda: expected one of auto, tpu, cpu; for an NVIDIA GPU, device=tpu with TPU_PLATFORM=cuda",
    ),
    (
        "execution: {train: fuse}",
        "execution.train=fuse: expected one of debug, strict, fused, compile, captured; did you mean fused?",
    ),
    (
        "execution: {train: auto}",
        "execution.train=auto: expected one of debug, strict, fused, compile, captured; auto is gone: "
        "fused, the default, was never slower",
    ),
    (
        "execution: {validate: auto}",
        "execution.validate=auto: expected one of debug, strict, fused, compile; auto is gone",
    ),
    ("schedule: {warmup_steps: 9, steps: 5}", "schedule.warmup_steps=9: expected at most schedule.steps=5"),
    (
        "batch: {tokens: 1000}",
        "batch.tokens=1000: expected a multiple of batch.sequences x data.sequence_length",
    ),
    (
        "trainer: {accumulate: 3}",
        "trainer.accumulate=3: expected nothing, it follows from batch.tokens",
    ),
    (
        "data: {sequence_length: 4096}\nbatch: {tokens: 32768}",
        "data.sequence_length=4096: expected at most 1024, the positions of the model",
    ),
    ("data: {vocab_size: 5000}", "data.vocab_size=5000: expected at most model.vocab_size=4096"),
    ("model: {name: lama-5m}", "model.name=lama-5m: expected one of llama-5m, llama-20m, "),
    ("model: {name: huggingface, config: 3}", "model.config=3: expected keys and values"),
    ("model: {config: {a: 1}}", "model.config={'a': 1}: expected nothing with model.name=llama-5m"),
    (
        "model: {name: huggingface, config: {a: '${b}'}}",
        "model.config.a: Interpolation key 'b' not found",
    ),
    ("trainer: {metrics: ['${b}']}", "trainer.metrics[0]: Interpolation key 'b' not found"),
    ("data: {source: digits}", "model.name=llama-5m: expected vit-digits or import with data.source=digits"),
    (
        "model: {name: vit-digits}",
        "model.name=vit-digits: expected a model of language with data.source=text",
    ),
    ("batch: {samples: 3}", "batch.samples=3: expected nothing (batch.tokens) with data.source=text"),
    (
        "model: {name: vit-digits}\ndata: {source: digits}",
        "batch.samples=null: expected a number of images with data.source=digits",
    ),
    (
        "model: {name: vit-digits, hidden_size: 30}\ndata: {source: digits}\nbatch: {samples: 3}",
        "model.hidden_size=30: expected a multiple of model.num_attention_heads=4",
    ),
    ("data: {source: docstrings, format: text}", "data.format=text: expected one of messages"),
    (
        "trainer: {metrics: [next_token_accuracy]}",
        "trainer.metrics=next_token_accuracy: expected accuracy: in a recipe the labels are the next tokens",
    ),
    ("seed: -1", "seed=-1: expected 0 or more"),
    ("seed: ${nothing}", "seed: Interpolation key 'nothing' not found"),
    ("include: llama", "include='llama': expected a list of names such as [model/llama-5m]"),
    ("include: [model/llama-5]", "include=model/llama-5: no "),
    ("a: [1", "not valid YAML: "),
    ("a:\n\tb: 1", "line 2, column 1: not valid YAML: a tab; indent with spaces"),
    ("", "empty; expected keys and values (`tputrain cp llama` gives a recipe to edit)"),
    ("a: 1\na: 2", "line 2, column 1: not valid YAML: found duplicate key a"),
    ("a: !!python/object/apply:os.system ['true']", "not valid YAML: could not determine a constructor"),
    ("- 1\n- 2", "expected keys and values, found a list"),
    ("just text", "just text"),
    ("1: 2", "1=2: unknown key"),
    ('"trainer.steps": 5', "trainer.steps=5: "),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_one_line_that_names_file_key_value_and_what_was_expected(tmp_path, text, message):
    with pytest.raises(UserError) as caught:
        load(tmp_path, text)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/my.yaml: "), said
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.step=3", "command line: trainer.step=3: unknown key; nearest known key: trainer.steps"),
        ("trainer.steps=x", "command line: trainer.steps='x': expected a whole number"),
        ("trainer.steps=0", "command line: trainer.steps=0: expected 1 or more"),
        ("trainer..steps=1", "command line: 'trainer..steps=1': expected key=value"),
        ("data.sequence_length=100", "command line: batch.tokens=1024: expected a multiple of"),
    ],
)
def test_a_mistake_on_the_command_line_is_blamed_on_it(tmp_path, override, message):
    with pytest.raises(UserError) as caught:
        load(tmp_path, "seed: 1", override)
    assert str(caught.value).startswith(message)


def test_what_does_not_fit_the_recipe_is_blamed_on_the_override_that_broke_it(tmp_path):
    with pytest.raises(UserError) as caught:
        load(tmp_path, "batch: {tokens: 1024}", "trainer.steps=7", "data.sequence_length=100")
    begins = "command line: data.sequence_length=100 does not fit "
    assert str(caught.value).startswith(f"{begins}{tmp_path}/my.yaml: batch.tokens=1024: expected a multiple")
    with pytest.raises(UserError, match=r"^.*my.yaml: optim.eps=-1.0"):
        load(tmp_path, "optim: {eps: -1.0}", "trainer.steps=7")


def test_a_mistake_in_a_piece_is_blamed_on_the_piece(tmp_path):
    (tmp_path / "piece.yaml").write_text("optim: {eps: -1}")
    with pytest.raises(UserError, match=r"piece.yaml: optim.eps=-1.0: expected a number above 0"):
        load(tmp_path, "include: [piece]")
    (tmp_path / "piece.yaml").write_text("include: [other]")
    with pytest.raises(UserError, match=r"piece.yaml: include: only a recipe can include"):
        load(tmp_path, "include: [piece]")


def test_a_recipe_that_is_no_text_is_one_line(tmp_path):
    (tmp_path / "my.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"my.yaml: ") as caught:
        read_recipe(tmp_path / "my.yaml")
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_names_those_there_are():
    with pytest.raises(
        UserError, match=r"lama: no such file, and no shipped recipe \(there are: .*llama.*\); did you"
    ):
        find_recipe("lama")
    with pytest.raises(
        UserError, match=r"a directory; expected a recipe \(`tputrain resume .*` goes on with a run"
    ):
        find_recipe(str(ROOT))
    assert find_recipe("llama") == ROOT / "recipes" / "llama.yaml"


def resolved(name: str) -> str:
    return json.dumps(asdict(read_recipe(find_recipe(name))), indent=1) + "\n"


def known_keys() -> str:
    """A key a line; one below which there may be any ends with ANY_BELOW."""
    known = _known_of_any_kind().items()
    return "".join(f"{key}{ANY_BELOW if get_origin(hint) is dict else ''}\n" for key, hint in known)


def renew() -> None:
    """Write what the shipped recipes resolve to now, and which keys there are."""
    KNOWN_KEYS.write_text(known_keys())
    for path in RESOLVED.glob("*.json"):
        path.unlink()
    for name in shipped_names("recipes"):
        (RESOLVED / f"{name}.json").write_text(resolved(name))


def test_every_shipped_recipe_resolves_to_what_is_on_record():
    recorded = {path.stem: path.read_text() for path in RESOLVED.glob("*.json")}
    assert recorded == {name: resolved(name) for name in shipped_names("recipes")}, RENEW


def test_the_keys_that_are_known_before_pytorch_is_loaded_are_those_there_are():
    assert KNOWN_KEYS.read_text() == known_keys(), RENEW


@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_every_shipped_recipe_is_valid_and_says_how_to_run_it(name):
    path = shipped_path("recipes", name)
    cfg = read_recipe(path)
    assert f"tputrain run {name}" in path.read_text().split("include:")[0]
    assert isinstance(cfg, RunConfig)


def test_the_llama_recipe_is_the_one_that_its_figures_were_measured_with():
    cfg = read_recipe(find_recipe("llama"))
    assert (cfg.model.name, cfg.data.vocab_size, cfg.data.sequence_length) == ("llama-5m", 4096, 128)
    assert (cfg.trainer.steps, cfg.batch.tokens, cfg.batch.sequences, cfg.trainer.accumulate) == (
        500,
        1024,
        8,
        1,
    )
    assert (cfg.seed, cfg.device, cfg.run_dir, cfg.checkpoint.resume) == (0, "auto", None, "auto")
    assert (cfg.execution.train, cfg.execution.validate) == ("fused", "fused")


def test_every_shipped_piece_can_be_included(tmp_path):
    for name in shipped_names("configs"):
        load(tmp_path, f"include: [{name}]")


NOISE = [
    *"\0\x01{}[]:,&*!%@`'\"#|>-?~ \nz9.é",
    "${a}",
    "<<: *x",
    "!!python/name:os.system",
    "1e999",
    "null",
    "[[[[",
]


@given(
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 8), st.sampled_from(NOISE)), min_size=1, max_size=4)
)
@settings(max_examples=100, deadline=None)
def test_a_recipe_mutated_at_random_is_valid_or_one_clear_line(tmp_path_factory, mutations):
    text = find_recipe("llama").read_text().partition("include:")[2]
    for place, removed, added in mutations:
        start = int(place * len(text))
        text = text[:start] + added + text[start + removed :]
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text("include:" + text)
    with suppress(UserError):
        read_recipe(path)
        return
    with pytest.raises(UserError) as caught:
        read_recipe(path)
    said = str(caught.value)
    assert ".yaml: " in said
    assert "\n" not in said


if __name__ == "__main__":
    renew()
