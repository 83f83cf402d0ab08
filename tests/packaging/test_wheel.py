"""The wheel carries all of it: packages, recipes and configs, the command, the entry point of the device.
Where it is installed no compiler is needed.

It is built for real, but for the extension, which takes minutes to compile: the one at hand is put in.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

from tpu_backend import abi

ROOT = Path(__file__).resolve().parents[2]


def setup(*arguments: str, configuration: Path) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", *arguments],
        cwd=ROOT,
        env=os.environ | {"DIST_EXTRA_CONFIG": str(configuration)},
        check=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    work = tmp_path_factory.mktemp("wheel")
    configuration = work / "setup.cfg"
    configuration.write_text(
        f"[build]\nbuild_base = {work}/build\nbuild_lib = {work}/lib\n"
        f"[egg_info]\negg_base = {work}\n"
        f"[bdist_wheel]\nskip_build = true\nbdist_dir = {work}/staged\ndist_dir = {work}\n"
    )
    setup("build_py", configuration=configuration)
    extension = abi.find_extension()
    shutil.copytree(extension, work / "lib" / "tpu_backend" / "extension" / extension.name)
    setup("bdist_wheel", configuration=configuration)
    (made,) = work.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder with the wheel's contents, as in site-packages."""
    site = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def run_elsewhere(installed: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `directory` with the wheel's contents before everything else that is installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_tracked_recipe_config_and_module_is_inside(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    yaml = {
        f"tputrain/shipped/{path.relative_to(ROOT)}"
        for name in ("recipes", "configs")
        for path in (ROOT / name).rglob("*.yaml")
    }
    modules = {
        str(path.relative_to(base))
        for base, package in ((ROOT, "tputrain"), (ROOT / "backend", "tpu_backend"))
        for path in (base / package).rglob("*.py")
    }
    assert "tputrain/shipped/recipes/llama.yaml" in yaml
    assert yaml | modules <= inside


def test_nothing_else_is_inside(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"tputrain", "tpu_backend"}


def test_the_wheel_holds_the_extension_and_what_it_was_built_for(wheel):
    folder = f"tpu_backend/extension/{abi.find_extension().name}"
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tpu_backend/extension/")]
    assert f"{folder}/_build_info.json" in names
    assert any(name.startswith(f"{folder}/_C.") for name in names)
    assert "none-any" not in wheel.name


def test_it_needs_the_torch_that_it_was_built_for(installed):
    (information,) = installed.glob("*.dist-info")
    needed = PathDistribution(information).requires or []
    major, minor = abi.Build.of_this_process().torch_release.split(".")
    assert [name for name in needed if name.startswith("torch")] == [
        f"torch<{major}.{int(minor) + 1},>={major}.{minor}"
    ]


def test_it_offers_the_command_and_the_device(installed):
    (information,) = installed.glob("*.dist-info")
    entries = {(entry.group, entry.name, entry.value) for entry in PathDistribution(information).entry_points}
    assert ("console_scripts", "tputrain", "tputrain.cli:run") in entries
    assert ("torch.backends", "tpu_backend", "tpu_backend:_autoload") in entries


def test_a_shipped_recipe_is_found_by_name_from_any_directory(installed, tmp_path):
    done = run_elsewhere(installed, tmp_path, "-m", "tputrain.cli", "validate", "llama")
    assert done.returncode == 0, done.stderr
    where = run_elsewhere(installed, tmp_path, "-c", "import tputrain; print(tputrain.__file__)")
    assert where.stdout.strip() == str(installed / "tputrain" / "__init__.py")


def test_a_recipe_of_the_user_s_own_is_found_by_path(installed, tmp_path):
    (tmp_path / "mine").mkdir()
    shutil.copy(ROOT / "recipes" / "llama.yaml", tmp_path / "mine" / "my.yaml")
    done = run_elsewhere(installed, tmp_path, "-m", "tputrain.cli", "validate", "mine/my.yaml")
    assert done.returncode == 0, done.stderr


TRAINS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tputrain import Trainer
import tpu_backend

data = TensorDataset(torch.rand(32, 4), torch.randint(3, (32,)))
trainer = Trainer(nn.Linear(4, 3), steps=3, train_loader=DataLoader(data, batch_size=8))
trainer.fit()
print(trainer.device, trainer.step, tpu_backend._C.__file__)
"""


def test_a_machine_without_a_compiler_installs_it_and_trains(wheel, tmp_path):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    python = environment / "bin" / "python"
    commands = tmp_path / "commands"  # the whole PATH: compilers that say when they are called
    commands.mkdir()
    for name in ("c++", "g++", "clang++", "cc", "gcc", "clang", "ninja", "ld"):
        (commands / name).write_text(f"#!/bin/sh\necho {name} >> {tmp_path}/called\nexit 1\n")
        (commands / name).chmod(0o755)
    bare = {"PATH": str(commands), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", wheel], env=bare, check=True, timeout=120)
    # What it depends on is taken from here; an environment's own packages come first.
    site = next((environment / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    done = subprocess.run(
        [python, "-c", TRAINS], env=bare, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    device, step, extension = done.stdout.split()[-3:]
    assert (device.split(":")[0], step) == ("tpu", "3")
    assert Path(extension).is_relative_to(site)
    assert not (tmp_path / "called").exists()
