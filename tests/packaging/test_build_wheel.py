"""The script that builds wheels. The wheel itself is tested in test_wheel.py."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / ".ci" / "build_wheel.py"))


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_build_finds_the_ninja_of_its_environment(script, tmp_path):
    said = tmp_path / "said"
    python = program(
        tmp_path / "bin" / "python", f"command -v ninja > {said}; echo $TPUTRAIN_TORCH_RELEASES >> {said}"
    )
    ninja = program(tmp_path / "bin" / "ninja", "exit 0")
    script["setup"](python, tmp_path, ["2.13", "2.14"], "objects", "build_ext")
    assert said.read_text().split() == [str(ninja), "2.13", "2.14"]


def test_an_environment_of_another_python_is_refused(script, tmp_path):
    python = program(tmp_path / "python", "echo '(3, 7) 2.13.0+cpu'")
    with pytest.raises(SystemExit, match=r"is Python \(3, 7\); expected"):
        script["torch_release"](python)


def test_a_release_of_torch_is_its_first_two_numbers(script, tmp_path):
    python = program(tmp_path / "python", f"echo '{sys.version_info[:2]} 2.13.0+cpu'")
    assert script["torch_release"](python) == "2.13"
