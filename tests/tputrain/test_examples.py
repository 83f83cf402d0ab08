"""The examples run as their first lines say, and reach what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run_example(name: str, directory: Path, device: str = "cpu") -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), device],
        cwd=directory,
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT / "backend"), str(ROOT)]),
            "OMP_NUM_THREADS": "1",  # threads cost a model of this size more than they bring
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plain_loop_learns_to_read_digits(tmp_path):
    recognised = re.search(r"recognised (\d+\.\d)%", run_example("plain_loop.py", tmp_path))
    assert recognised is not None
    assert float(recognised[1]) > 95.0


def test_the_python_api_example_learns_to_read_digits_and_logs_every_step(tmp_path):
    accuracy = re.search(r"held-out digits: (0\.\d+)", run_example("python_api.py", tmp_path))
    assert accuracy is not None
    assert float(accuracy[1]) > 0.94
    assert len((tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()) == 300


def test_the_callback_of_the_example_ends_the_run_long_before_its_last_step(tmp_path):
    ended = re.search(r"good enough at step (\d+)", run_example("custom_callback.py", tmp_path))
    assert ended is not None
    assert int(ended[1]) < 150


def test_a_model_and_a_loss_of_ones_own_learn_to_read_digits(tmp_path):
    recognised = re.search(r"recognised (\d+\.\d)%", run_example("custom_model.py", tmp_path))
    assert recognised is not None
    assert float(recognised[1]) > 96.0


def test_a_jax_function_inside_a_model_learns_the_decay_behind_its_data(tmp_path):
    learned = re.search(r"a decay of (0\.\d\d)", run_example("jax_function.py", tmp_path, "tpu"))
    assert learned is not None
    assert 0.89 <= float(learned[1]) <= 0.91


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_says_how_to_run_it(path):
    assert f"python examples/{path.name}" in path.read_text().split('"""')[1]
