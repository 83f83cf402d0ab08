"""An extension that does not fit the torch it meets is refused in one line that says how to rebuild it."""

import dataclasses
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tpu_backend import abi

HERE = abi.Build.of_this_process()


def extension_folder(path: Path, **changes: object) -> Path:
    """A folder with an (empty) extension that says it was built for this process, but for `changes`."""
    folder = path / "site-packages" / "tpu_backend"
    folder.mkdir(parents=True)
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    info = dataclasses.asdict(dataclasses.replace(HERE, **changes))
    (folder / "_build_info.json").write_text(json.dumps(info))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(ImportError) as caught:
        abi.check(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install --no-build-isolation --no-deps" in message
    return message


def test_an_extension_built_for_this_process_is_accepted(tmp_path):
    abi.check(extension_folder(tmp_path))


def test_another_patch_release_or_local_build_of_torch_is_accepted(tmp_path):
    release = HERE.torch_release
    abi.check(extension_folder(tmp_path, torch=f"{release}.9+cu130"))


def test_another_torch_is_refused_and_both_are_named(tmp_path):
    message = refusal(extension_folder(tmp_path, torch="2.11.0+cu128"))
    assert f"built for torch 2.11.0+cu128 and met torch {HERE.torch}" in message


def test_another_cxx_abi_is_refused(tmp_path):
    assert "C++11 ABI" in refusal(extension_folder(tmp_path, cxx11_abi=not HERE.cxx11_abi))


def test_another_python_is_refused_and_both_are_named(tmp_path):
    message = refusal(extension_folder(tmp_path, python="3.9"))
    assert f"built for Python 3.9 and met Python {HERE.python}" in message


def test_an_extension_with_a_foreign_suffix_is_named(tmp_path):
    folder = extension_folder(tmp_path)
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").rename(folder / "_C.cpython-39-mips.so")
    assert "_C.cpython-39-mips.so" in refusal(folder)


def test_a_missing_extension_is_said_to_be_not_built(tmp_path):
    folder = extension_folder(tmp_path)
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").unlink()
    assert "is not built" in refusal(folder)


def test_an_unreadable_build_record_is_named(tmp_path):
    folder = extension_folder(tmp_path)
    (folder / "_build_info.json").write_text('{"torch": "2.13.0"')
    assert str(folder / "_build_info.json") in refusal(folder)


def test_in_a_source_tree_the_rebuild_stays_editable(tmp_path):
    folder = extension_folder(tmp_path, torch="2.11.0")
    (tmp_path / "setup.py").touch()
    assert f"-e {tmp_path}`" in refusal(folder)
