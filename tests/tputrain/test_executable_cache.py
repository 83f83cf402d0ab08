"""`tputrain` keeps compiled programs for the next command: where, and that the next one compiles nothing."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tputrain.tiny_run import RECIPE
from tpu_backend import executable_cache
from tputrain import device as devices
from tputrain.device import EXECUTABLE_CACHE
from tputrain.errors import UserError
from tputrain.execution import ExecutionConfig
from tputrain.loggers.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]


def train(directory: Path, run: str, hash_seed: int) -> str:
    """Train the tiny recipe on the tpu device in a new process, at home in `directory`; what it says, errors
    and all.
    """
    paths = [str(ROOT / "backend"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    kept = {name: value for name, value in os.environ.items() if name != "TPU_CACHE_DIR"}
    home = {"HOME": str(directory), "PYTHONHASHSEED": str(hash_seed), "TPU_PLATFORM": "cpu"}
    home["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    settings = ["device=tpu", f"run_dir={run}", "trainer.steps=2", "sample.max_new_tokens=0"]
    done = subprocess.run(
        [sys.executable, "-m", "tputrain.cli", "run", "tiny.yaml", *settings],
        cwd=directory,
        env=kept | home,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_second_run_of_a_recipe_compiles_nothing_and_is_the_same(tmp_path):
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    (tmp_path / "text.txt").write_text("def add(first, second):\n    return first + second\n" * 100)
    first = train(tmp_path, "first", hash_seed=1)
    num_compiled = re.search(r"^programs: (\d+) compiled in [\d.]+ s, 0 found in (.*)$", first, re.MULTILINE)
    assert num_compiled is not None, first
    assert num_compiled[2] == str(tmp_path / ".cache" / "tputrain" / "executables")
    assert "device tpu → XLA:CPU (TPU_PLATFORM=cpu)" in first.splitlines()
    second = train(tmp_path, "second", hash_seed=2)
    assert f"programs: 0 compiled in 0.0 s, {num_compiled[1]} found in " in second
    cold, warm = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("first", "second"))
    assert [record["loss_hex"] for record in warm] == [record["loss_hex"] for record in cold]
    assert sum(record["disk_hits"] for record in warm) == sum(record["compilations"] for record in cold) > 0
    assert {record["compilations"] for record in warm} == {record["disk_hits"] for record in cold} == {0}


@pytest.mark.parametrize(("chosen", "used"), [("mine", "mine"), ("none", None), (None, "before")])
def test_the_recipe_comes_before_what_the_device_has_from_the_environment(
    tmp_path, monkeypatch, chosen, used
):
    monkeypatch.chdir(tmp_path)
    torch.tpu.set_executable_cache("before")
    try:
        devices.use_executable_cache(torch.device("tpu"), chosen)
        assert torch.tpu.get_executable_cache() == (None if used is None else tmp_path / used)
        devices.use_executable_cache(torch.device("cpu"), "elsewhere")
        assert torch.tpu.get_executable_cache() == (None if used is None else tmp_path / used)
    finally:
        torch.tpu.set_executable_cache(None)


def test_commands_and_scripts_share_one_directory():
    assert EXECUTABLE_CACHE == executable_cache.DEFAULT


@pytest.mark.parametrize("value", ["", "False", "off"])
def test_what_is_no_directory_is_refused(value):
    expected = f"execution.executable_cache={value}: expected a directory, or none; left out"
    with pytest.raises(UserError, match=re.escape(f"{expected}, it is {EXECUTABLE_CACHE}")):
        ExecutionConfig(executable_cache=value)
