"""A machine that cannot compile is told so in one line, before anything is downloaded or built."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Runs setup.py's metadata step, which pip asks for first, in a copy of this process's Python.
METADATA = "import runpy, sys; sys.argv = ['setup.py', 'dist_info', '-o', {target!r}]; "
RUN = "runpy.run_path('setup.py', run_name='__main__')"


def metadata_refusal(tmp_path: Path, before: str = "", **environment: str) -> str:
    """The one line that asking for the package's metadata ends with."""
    code = METADATA.format(target=str(tmp_path)) + before + RUN
    kept = {name: value for name, value in os.environ.items() if name != "CXX"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("tputrain: ")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.dist-info")), "metadata was written although nothing can be built"
    return lines[0]


def test_a_missing_compiler_is_named_with_the_command_that_installs_one(tmp_path):
    line = metadata_refusal(tmp_path, PATH=str(tmp_path))
    assert "no C++ compiler found" in line
    for command in ("apt-get install g++", "dnf install gcc-c++"):
        assert command in line


def test_only_the_command_of_this_machine_is_given_where_it_is_known(tmp_path):
    installer = tmp_path / "dnf"
    installer.touch(mode=0o755)
    line = metadata_refusal(tmp_path, PATH=str(tmp_path))
    assert "dnf install gcc-c++" in line
    assert "apt-get" not in line


def test_a_compiler_named_in_the_environment_that_does_not_exist_is_named(tmp_path):
    assert "'/nowhere/g++ -pipe'" in metadata_refusal(tmp_path, CXX="/nowhere/g++ -pipe")


def test_a_missing_python_header_is_named_with_its_place(tmp_path):
    patch = f"import sysconfig; p = sysconfig.get_paths(); p['include'] = {str(tmp_path)!r}; "
    line = metadata_refusal(tmp_path, before=patch + "sysconfig.get_paths = lambda *a, **k: p; ")
    assert f"{tmp_path}/Python.h" in line
    assert f"python{sysconfig.get_python_version()}" in line


@pytest.mark.parametrize("message", ["error: unrecognized option '-std=c++20'"])
def test_a_compiler_that_is_too_old_is_named_with_its_own_words(tmp_path, message):
    compiler = tmp_path / "old-g++"
    compiler.write_text(f'#!/bin/sh\necho "{message}" >&2\nexit 1\n')
    compiler.chmod(0o755)
    line = metadata_refusal(tmp_path, CXX=str(compiler))
    assert "cannot compile C++20" in line
    assert message in line
