"""Every shipped recipe runs offline by the command line, and its first losses are the ones on record.

The record is tests/tputrain/recipe_losses.json; where a change of it is meant, write it anew:

    PYTHONPATH=backend:. python -m tests.tputrain.test_recipe_runs
"""

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from tputrain import UserError, load_recipe
from tputrain.cli import main
from tputrain.data import Tokenizer
from tputrain.loggers.jsonl import read_jsonl
from tputrain.shipped import shipped_names

RECORD = Path(__file__).with_name("recipe_losses.json")
STEPS = 4

LLAMA = [
    *("model.vocab_size=300", "model.hidden_size=16", "model.intermediate_size=16", "model.head_dim=8"),
    *("model.num_hidden_layers=1", "model.num_attention_heads=2", "model.num_key_value_heads=1"),
]
TEXT = ["data.vocab_size=280", "data.sequence_length=32", "batch.tokens=128", "batch.sequences=4"]
TEXT += ["data.cache_dir=cache"]
SMALLER = {
    "llama": [*LLAMA, *TEXT, "data.files=notes.txt"],
    "instruct": [*LLAMA, *TEXT, "data.source=jsonl", "data.files=chats.jsonl"],
    "gpt2": [
        *TEXT,
        "data.files=notes.txt",
        *(f"model.config.{size}" for size in ("vocab_size=300", "n_embd=16", "n_layer=1", "n_head=2")),
    ],
    "huggingface": [*TEXT, "model.path=theirs", "data.tokenizer=theirs", "data.files=notes.txt"],
    "digits": ["model.num_hidden_layers=1", "batch.samples=16"],
}
"""What makes each recipe quick, on data that no upgrade of Python changes."""


def write_data(directory: Path) -> None:
    """Text, conversations and a directory of Hugging Face, the same on every machine."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    notes = "".join(f"value_{number} = {number * number % 97}\n" for number in range(700))
    (directory / "notes.txt").write_text(notes)
    chats = [
        [
            {"role": "user", "content": f"What is {number} times {number}?"},
            {"role": "assistant", "content": f"{number} times {number} is {number * number}."},
        ]
        for number in range(200)
    ]
    rows = (json.dumps({"messages": messages}) + "\n" for messages in chats)
    (directory / "chats.jsonl").write_text("".join(rows))
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**shape, **off, bos_token_id=0, eos_token_id=0)).save_pretrained(
        directory / "theirs"
    )
    Tokenizer.train([notes], 280).save(directory / "theirs")


def run(name: str, device: str, in_python: bool = False) -> dict[str, float]:
    """Train the recipe for a few steps in the current directory; its losses, and its last evaluation."""
    run_dir = f"{name}-{device}"
    quickly = [f"trainer.steps={STEPS}", "trainer.evaluate_batches=2", "schedule.warmup_steps=0"]
    quiet = [f"sample.max_new_tokens={2 * (device == 'cpu')}", "log.progress=none", f"run_dir={run_dir}"]
    quiet += ["trainer.metrics=[accuracy]"]
    overrides = [f"device={device}", *SMALLER[name], *quickly, *quiet]
    if in_python:
        load_recipe(name, *overrides).build().fit()
    else:
        assert main(["run", name, *overrides]) == 0
    steps = {f"step {r['step']}": r["loss"] for r in read_jsonl(Path(run_dir) / "metrics.jsonl")}
    last = read_jsonl(Path(run_dir) / "evaluations.jsonl")[-1]
    return steps | {"evaluation": last["loss"], "accuracy": last["accuracy"]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipes")
    write_data(path)
    return path


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("name", shipped_names("recipes"))
def test_a_recipe_trains_offline_and_gives_the_losses_on_record(name, device, directory, monkeypatch):
    monkeypatch.chdir(directory)
    recorded = json.loads(RECORD.read_text())[name]
    assert run(name, device) == pytest.approx(recorded, rel=1e-4)
    assert recorded[f"step {STEPS}"] < recorded["step 1"]


def test_a_recipe_in_python_is_the_run_of_the_command_line_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("digits", "cpu", in_python=True) == pytest.approx(
        json.loads(RECORD.read_text())["digits"], rel=1e-4
    )
    quiet = [*SMALLER["digits"], "run_dir=digits-cpu", "log.progress=none"]
    with pytest.raises(
        UserError, match=r"^seed=3: digits-cpu/checkpoints/step-4 was made with seed=0; set it"
    ):
        load_recipe("digits", "device=cpu", "seed=3", *quiet).build()
    trainer = load_recipe("digits", "device=cpu", "trainer.steps=6", *quiet).build()
    trainer.fit()
    assert [record["step"] for record in read_jsonl(Path("digits-cpu/metrics.jsonl"))] == [1, 2, 3, 4, 5, 6]


def evaluations(run_dir: str) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_jsonl(Path(run_dir) / "evaluations.jsonl")}


def test_a_run_begins_where_another_ended_in_our_own_model_and_in_that_of_transformers(
    directory, monkeypatch, capsys
):
    monkeypatch.chdir(directory)
    quiet = ["sample.max_new_tokens=0", "log.progress=none", "data.cache_dir=cache", "device=cpu"]
    text = [*TEXT, "data.files=notes.txt", "trainer.evaluate_batches=2", *quiet]
    from_it = ["model.path=first", "data.tokenizer=first", "trainer.steps=1", *text]
    assert main(["run", "llama", *LLAMA, *text, "trainer.steps=3", "run_dir=first"]) == 0
    assert main(["run", "llama", *LLAMA, *from_it, "run_dir=second"]) == 0
    assert main(["run", "huggingface", *from_it, "run_dir=third"]) == 0
    ended_at = evaluations("first")[3]
    assert evaluations("second")[0] == ended_at
    assert evaluations("third")[0] == pytest.approx(ended_at, rel=1e-4)
    capsys.readouterr()
    shutil.rmtree("first")  # what they began with need not be there any more, or may be another model
    assert main(["validate", "third"]) == 0
    Path("first").mkdir()
    Path("first/config.json").write_text('{"max_position_embeddings": 2, "vocab_size": 2}')
    assert main(["sample", "third", "--prompt", "value", "--max-new-tokens", "2"]) == 0
    capsys.readouterr()
    assert main(["run", "llama", *LLAMA, *from_it, "run_dir=fourth", "model.path=null"]) == 2
    assert "data.tokenizer=first: no tokenizer in first" in capsys.readouterr().err
    shutil.rmtree("first")
    assert main(["run", "llama", *LLAMA, *from_it, "run_dir=fourth", "data.tokenizer=null"]) == 2
    assert "model.path=first: no such directory; expected one with *.safetensors" in capsys.readouterr().err


def test_lora_says_where_what_it_freezes_has_learned_nothing(directory, monkeypatch, capsys):
    monkeypatch.chdir(directory)
    small = [*LLAMA, *TEXT, "data.files=notes.txt", "data.cache_dir=cache", "device=cpu", "log.progress=none"]
    small += ["trainer.steps=1", "trainer.evaluate_batches=1", "sample.max_new_tokens=0"]
    assert main(["run", "llama", *small, "run_dir=base"]) == 0
    assert "learned nothing" not in capsys.readouterr().out
    assert main(["run", "llama", *small, "lora.rank=2", "run_dir=noise"]) == 0
    said = capsys.readouterr().out
    assert "note: lora.rank freezes a model that has learned nothing yet" in said
    assert " parameters, 416 of them trained\n" in said, said
    with_it = [*small, "lora.rank=2", "model.path=base", "data.tokenizer=base", "run_dir=learned"]
    assert main(["run", "llama", *with_it]) == 0
    assert main(["run", "llama", *small, "lora.rank=2", "trainer.steps=2", "run_dir=noise"]) == 0
    assert "learned nothing" not in capsys.readouterr().out  # nor again, once it trains


def test_a_run_on_images_is_evaluated_and_writes_no_text(directory, monkeypatch, capsys):
    monkeypatch.chdir(directory)
    small = [*SMALLER["digits"], "device=cpu", "log.progress=none", "run_dir=images"]
    assert main(["run", "digits", *small, "trainer.steps=2"]) == 0
    assert main(["resume", "images", "trainer.steps=3", "log.progress=none"]) == 0
    assert main(["validate", "images"]) == 0
    assert "accuracy: " in capsys.readouterr().out
    assert main(["sample", "images", "--prompt", "x"]) == 2
    assert "its model reads images and writes no text" in capsys.readouterr().err


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        os.chdir(temporary)
        write_data(Path(temporary))
        losses = {name: run(name, "cpu") for name in shipped_names("recipes")}
    RECORD.write_text(json.dumps(losses, indent=1) + "\n")
    sys.stdout.write(f"{RECORD}: written\n")
