"""2,400 configurations and checkpoints, mutated at random: each is accepted or refused in one line, and
nothing in one is ever run. Every day the first few hundred, all of them with `pytest -m sweep`.
"""

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from tputrain import RunConfig, Trainer, TrainerConfig
from tputrain.checkpoint.integrity import CHECKSUMS, COMPLETE, seal
from tputrain.checkpoint.state import STATE, load_state
from tputrain.checkpoint.store import CheckpointStore
from tputrain.config import CheckpointConfig
from tputrain.errors import UserError
from tputrain.recipe import RecipeConfig, config_from_json, read_recipe
from tputrain.report.run_files import read_run

RECIPE = """
seed: 3
device: cpu
model: {name: llama-5m, vocab_size: 300, num_hidden_layers: 1, rope_theta: 1.0e4}
data: {files: "notes/*.txt", vocab_size: 280, sequence_length: 16, validation_fraction: 0.1}
batch: {tokens: 128, sequences: 4}
trainer: {steps: 4, evaluate_every: null, max_grad_norm: 1.0}
optim: {name: adamw, learning_rate: 3.0e-3}
schedule: {name: cosine, warmup_steps: 2}
checkpoint: {every: 2, keep_last: 1}
"""


def seeds(count: int) -> pytest.MarkDecorator:
    """So many mutations: an eighth of them every day, the others in a sweep."""
    first = count // 8
    others = pytest.param(range(first, count), marks=pytest.mark.sweep, id="others")
    return pytest.mark.parametrize("seeds", [pytest.param(range(first), id="first"), others])


# What would do something if it were run, followed, expanded or believed.
HOSTILE_TEXT = [
    "!!python/object/apply:os.system ['true']",
    "!!python/name:os.system",
    "!!python/module:antigravity",
    "!!python/object/new:subprocess.Popen [['true']]",
    "${oc.env:HOME}",
    "${seed}",
    "${nothing.there}",
    "__import__('os').system('true')",
    "{_target_: os.system, command: 'true'}",
    "&a [*a]",
    "[1, 2",
    "? :",
    "\t",
    "\0",
    "é\u2028x",
    "null",
    ".nan",
    "-.inf",
    "1" * 400,
    "-1",
    "0",
    "1e999",
    "yes",
    "os.system",
    "../../etc/passwd",
    "{a: {b: {c: {}}}}",
    "2026-01-31",
    "!!binary aGVsbG8=",
]
HOSTILE_VALUES: list[Any] = [
    None, True, -1, 0, 10**40, 1e308, float("nan"), "", "os.system", "${seed}", "${oc.env:HOME}", "\n\n", [],
    {}, [[]], {"_target_": "os.system"}, {"__class__": "os.system"}, {"": 1}, "x" * 10_000,
]  # fmt: skip

_RUNS_SOMETHING = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class"}
_watched: list[str] | None = None


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if _watched is not None and event in _RUNS_SOMETHING:
        _watched.append(event)


sys.addaudithook(_watch)


@contextmanager
def nothing_runs() -> Iterator[None]:
    """Inside, no process may be started and nothing unpickled, not even in vain."""
    global _watched
    _watched = seen = []
    try:
        yield
    finally:
        _watched = None
    assert not seen


def outcome(attempt: Callable[[], object], *where: str) -> str:
    """`accepted`, or the one line that it was refused with, which names the place."""
    try:
        with nothing_runs():
            attempt()
    except UserError as error:
        said = str(error)
        assert "\n" not in said
        assert 10 < len(said) < 1000
        assert any(place in said for place in where), said
        return said
    return "accepted"


def test_what_watches_would_see_a_process():
    with pytest.raises(AssertionError), nothing_runs():
        sys.audit("os.system", b"true")


# -- configurations ------------------------------------------------------------------------------------------


def mutated_text(draw: random.Random, text: str) -> str:
    """With some characters, words or lines of it gone, moved or replaced."""
    for _ in range(draw.randint(1, 2)):
        lines = text.splitlines(keepends=True)
        place, line = draw.randrange(len(text)), draw.randrange(len(lines))
        match draw.randrange(5):
            case 0:
                text = text[:place] + draw.choice(HOSTILE_TEXT) + text[place + draw.randint(0, 6) :]
            case 1:
                text = text[:place] + text[place + draw.randint(1, 10) :]
            case 2:
                del lines[line]
                text = "".join(lines)
            case 3:
                key = lines[line].partition(":")[0] or "x"
                lines[line] = f"{key}: {draw.choice(HOSTILE_TEXT)}\n"
                text = "".join(lines)
            case 4:
                text = text[:place] + chr(draw.choice([0, 9, 0x7F, 0xD7FF, *range(33, 126)])) + text[place:]
    return text


def mutated_tree(draw: random.Random, tree: Any) -> Any:
    """A copy of nested dicts and lists in which one thing is gone, renamed or replaced."""
    tree = json.loads(json.dumps(tree))
    node = tree
    while isinstance(node, (dict, list)) and node:
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        if isinstance(node[key], (dict, list)) and node[key] and draw.random() < 0.8:
            node = node[key]
            continue
        match draw.randrange(4):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[str(key)[:-1] + draw.choice("xyz.")] = node.pop(key)
            case _:
                node[key] = draw.choice(HOSTILE_VALUES)
        return tree
    return tree


@seeds(600)
def test_a_mutated_recipe_is_valid_or_refused_in_one_line(tmp_path, seeds):
    path, seen = tmp_path / "mutated.yaml", []
    for seed in seeds:
        path.write_text(mutated_text(random.Random(seed), RECIPE), encoding="utf-8")
        seen.append(outcome(lambda: read_recipe(path), "mutated.yaml: "))
    # It tries both what is harmless and what is not.
    assert 0.03 < seen.count("accepted") / len(seeds) < 0.7
    assert len({said.rpartition(": ")[2] for said in seen}) > len(seeds) / 12


@seeds(600)
def test_mutated_keys_and_values_are_valid_or_refused_in_one_line(seeds):
    whole, seen = yaml.safe_load(RECIPE), []
    for seed in seeds:
        values = mutated_tree(random.Random(seed), whole)
        seen.append(outcome(lambda values=values: config_from_json(values, "state.json"), "state.json: "))
    assert 0.03 < seen.count("accepted") / len(seeds) < 0.7


@pytest.mark.parametrize("text", [text for text in HOSTILE_TEXT if text.startswith("!!python")])
@pytest.mark.parametrize("key", ["seed", "device", "run_dir", "model", "include", "other"])
def test_no_key_of_a_recipe_can_name_code(tmp_path, key, text):
    (tmp_path / "bad.yaml").write_text(f"{key}: {text}\n")
    assert "not valid YAML: could not determine a constructor" in outcome(
        lambda: read_recipe(tmp_path / "bad.yaml"), "bad.yaml: line 1"
    )


# -- checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of two steps with one checkpoint."""
    directory = tmp_path_factory.mktemp("run")
    trainer(directory).fit()
    return directory


def trainer(directory: Path) -> Trainer:
    torch.manual_seed(0)
    cfg = RunConfig(
        device="cpu",
        run_dir=str(directory),
        trainer=TrainerConfig(steps=2),
        checkpoint=CheckpointConfig(every=None),
    )
    batch = (torch.ones(2, 3), torch.tensor([0, 1]))
    return Trainer(nn.Linear(3, 2), cfg, train_loader=[batch])


@pytest.fixture
def copied(run, tmp_path) -> Callable[[], Path]:
    """A fresh copy of the run's checkpoint at each call, in a run directory of its own."""

    def copy() -> Path:
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
        return tmp_path / "checkpoints" / "step-2"

    return copy


def mutated_bytes(draw: random.Random, content: bytes) -> bytes:
    """Other bytes than `content`."""
    place = draw.randrange(len(content))
    return draw.choice(
        [
            content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :],
            content[:place],
            content + b"\0",
            content[:place] + b"\x80\x04cos\nsystem\n(S'true'\ntR." + content[place:],
        ]
    )


@seeds(400)
def test_a_checkpoint_with_any_byte_changed_is_refused_in_one_line(copied, seeds):
    for seed in seeds:
        draw, checkpoint = random.Random(seed), copied()
        path = draw.choice(sorted(checkpoint.iterdir()))
        if draw.random() < 0.1:
            path.unlink()
        else:
            path.write_bytes(mutated_bytes(draw, path.read_bytes()))
        store = CheckpointStore(checkpoint.parent)
        said = outcome(lambda store=store: store.newest(lambda *_: None), "no whole checkpoint")
        assert path.name in said or CHECKSUMS in said


@seeds(800)
def test_a_checkpoint_that_was_edited_and_sealed_anew_is_taken_or_refused_in_one_line(
    copied, tmp_path, seeds
):
    """No checksum protects from this: the edit itself must be harmless."""
    seen = []
    for seed in seeds:
        draw, checkpoint = random.Random(seed), copied()
        for name in (CHECKSUMS, COMPLETE):
            (checkpoint / name).unlink()
        path = draw.choice([checkpoint / STATE, *sorted(checkpoint.iterdir())])
        if path.name == STATE and draw.random() < 0.8:
            path.write_text(json.dumps(mutated_tree(draw, json.loads(path.read_text()))))
        else:
            path.write_bytes(mutated_bytes(draw, path.read_bytes()))
        seal(checkpoint)
        seen.append(outcome(lambda: trainer(tmp_path).resume(), str(checkpoint)))
        outcome(lambda checkpoint=checkpoint: config_of(checkpoint), str(checkpoint))
        outcome(lambda: read_run(tmp_path), str(checkpoint))
    assert 0.1 < seen.count("accepted") / len(seeds) < 0.9


def config_of(checkpoint: Path) -> RecipeConfig:
    """As `tputrain sample`, `validate` and `resume` read it."""
    return config_from_json(load_state(checkpoint)["config"], str(checkpoint / STATE))
