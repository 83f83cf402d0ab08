"""The wheel carries all of it: packages, recipes and configs, the command, the entry point of the device.

It is built for real, but for the extension, which takes minutes to compile: the one at hand is put in.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PathDistribution
from pathlib import Path

import pytest

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
    device = importlib.util.find_spec("tpu_backend")
    assert device is not None
    assert device.origin is not None
    for built in (
        *Path(device.origin).parent.glob("_C*"),
        *Path(device.origin).parent.glob("_build_info.json"),
    ):
        shutil.copy2(built, work / "lib" / "tpu_backend")
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
    names = [name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tpu_backend/_")]
    assert "tpu_backend/_build_info.json" in names
    assert any(name.startswith("tpu_backend/_C.") for name in names)
    assert "none-any" not in wheel.name


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
