"""The commands in the README, in continuous integration and here are the same commands."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEST_COMMAND = "pip install -e '.[test]' && pytest"
TORCH = "torch>=2.13,<2.14"
INSTALL_COMMAND = "pip install . && tputrain run recipes/llama.yaml"


def fenced_lines(text: str) -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]


def test_the_readme_gives_each_command_exactly_once():
    lines = fenced_lines((ROOT / "README.md").read_text())
    assert lines.count(INSTALL_COMMAND) == 1
    assert lines.count(TEST_COMMAND) == 1


def test_continuous_integration_runs_the_readme_s_test_command():
    done = subprocess.run(
        ["bash", ".ci/run", "--print-test-command"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert done.stdout.strip() == TEST_COMMAND


def test_torch_is_pinned_for_building():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [name for name in project["build-system"]["requires"] if name.startswith("torch")] == [TORCH]
