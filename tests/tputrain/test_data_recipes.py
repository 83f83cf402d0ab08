"""Recipes on every kind of data, by the command line: run, resume, validate, sample, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.tputrain.test_conversations import TEMPLATE, byte_level
from tputrain.cli import main
from tputrain.loggers.jsonl import read_jsonl

RECIPE = """
device: cpu
model:
  {name: llama-5m, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}
data: {source: jsonl, files: chats.jsonl, vocab_size: 280, sequence_length: 32, cache_dir: cache}
batch: {tokens: 256, sequences: 4}
trainer: {steps: 4, evaluate_every: 2, evaluate_batches: 2}
schedule: {name: constant}
checkpoint: {every: 2}
sample: {max_new_tokens: 4}
"""


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    rows = [
        {
            "text": f"note {number}: " + "words " * 12,
            "prompt": f"{number}+1?",
            "answer": f"It is {number + 1}.",
        }
        for number in range(150)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    byte_level(TEMPLATE).save_pretrained("tokenizer")
    return tmp_path


def losses(run_dir: Path) -> dict[int, str]:
    return {record["step"]: record["loss_hex"] for record in read_jsonl(run_dir / "metrics.jsonl")}


@pytest.mark.parametrize(
    "settings",
    [
        ["data.format=prompt", "data.tokenizer=tokenizer", "data.layout=padded", "data.buckets=2"],
        ["data.streaming=true", "data.shuffle_block=8"],
    ],
    ids=["answers-padded", "stream"],
)
def test_a_run_goes_on_as_if_it_had_not_stopped(directory, settings, capsys):
    assert main(["run", "tiny.yaml", *settings, "run_dir=whole"]) == 0
    for steps in (1, 4):
        assert main(["run", "tiny.yaml", *settings, "run_dir=parts", f"trainer.steps={steps}"]) == 0
    assert losses(directory / "parts") == losses(directory / "whole")
    assert main(["validate", "parts"]) == 0
    assert "bits per byte: " in capsys.readouterr().out
    assert main(["sample", "parts", "--prompt", "It", "--max-new-tokens", "3"]) == 0
    assert main(["run", "tiny.yaml", *settings, "run_dir=parts", "data.text_column=prompt"]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["data.tokenizer=tokenizer", "model.vocab_size=200"],
            "model.vocab_size=200: expected at least the tokenizer's 262 entries; raise it, or choose",
        ),
        (
            ["data.text_column=txt"],
            "data.text_column=txt: no such column in data.files='chats.jsonl', which has",
        ),
        (["data.files=chat.jsonl"], "did you mean chats.jsonl?"),
        (["data.sorce=csv"], "data.sorce='csv': unknown key; nearest known key: data.source"),
        (["data.format=chat"], "data.format=chat: expected one of text, messages, prompt"),
    ],
)
def test_what_cannot_be_trained_on_ends_with_one_line_and_exit_code_2(settings, message, capsys):
    assert main(["run", "tiny.yaml", *settings]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
