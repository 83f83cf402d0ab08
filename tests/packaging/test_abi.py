"""The extension of the torch at hand is chosen; what does not fit is refused in one line that says why."""

import dataclasses
import json
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tpu_backend import abi

HERE = abi.Build.of_this_process()


def name_of(release: str) -> str:
    return f"torch_{release.replace('.', '_')}"


OWN = Path("extension") / name_of(HERE.torch_release)
"""Where the extension for this torch lies in a package."""


def package_with_extension(path: Path, release: str = HERE.torch_release, **changes: object) -> Path:
    """A package with an (empty) extension for `release`, built for this process but for `changes`."""
    package = path / "site-packages" / "tpu_backend"
    folder = package / "extension" / name_of(release)
    folder.mkdir(parents=True)
    (folder / f"_C{EXTENSION_SUFFIXES[0]}").touch()
    info = dataclasses.asdict(dataclasses.replace(HERE, **changes))
    (folder / "_build_info.json").write_text(json.dumps(info))
    return package


def refusal(package: Path) -> str:
    with pytest.raises(ImportError) as caught:
        abi.find_extension(package)
    message = str(caught.value)
    assert "\n" not in message
    assert "pip install --no-build-isolation --no-deps" in message
    return message


def test_an_extension_built_for_this_process_is_found(tmp_path):
    package = package_with_extension(tmp_path)
    assert abi.find_extension(package) == package / OWN


def test_another_patch_release_or_local_build_of_torch_is_accepted(tmp_path):
    release = HERE.torch_release
    abi.find_extension(package_with_extension(tmp_path, torch=f"{release}.9+cu130"))


def test_of_several_the_one_for_this_torch_is_found(tmp_path):
    for release in ("2.3", HERE.torch_release, "9.1"):
        package = package_with_extension(tmp_path, release)
    assert abi.find_extension(package) == package / OWN


def test_this_process_has_the_extension_of_its_torch():
    from tpu_backend import _C

    assert Path(_C.__file__).parent == abi.find_extension()


def test_a_torch_that_no_extension_is_for_is_refused_and_those_there_are_named(tmp_path):
    for release in ("2.3", "2.11"):
        package = package_with_extension(tmp_path, release)
    message = refusal(package)
    assert f"was built for torch 2.3 and 2.11 and met torch {HERE.torch}; " in message
    assert "; install torch 2.3 or 2.11, or rebuild it" in message


def test_another_torch_in_the_folder_of_this_one_is_refused_and_both_are_named(tmp_path):
    message = refusal(package_with_extension(tmp_path, torch="2.11.0+cu128"))
    assert f"built for torch 2.11.0+cu128 and met torch {HERE.torch}" in message


def test_another_python_is_refused_and_both_are_named(tmp_path):
    message = refusal(package_with_extension(tmp_path, python="3.9"))
    assert f"built for Python 3.9 and met Python {HERE.python}" in message


def test_an_extension_with_a_foreign_suffix_is_named(tmp_path):
    package = package_with_extension(tmp_path)
    (package / OWN / f"_C{EXTENSION_SUFFIXES[0]}").rename(package / OWN / "_C.cpython-39-mips.so")
    assert "_C.cpython-39-mips.so" in refusal(package)


def test_a_missing_extension_is_said_to_be_not_built(tmp_path):
    package = package_with_extension(tmp_path)
    (package / OWN / f"_C{EXTENSION_SUFFIXES[0]}").unlink()
    assert "is not built" in refusal(package)


def test_an_unreadable_build_record_is_named(tmp_path):
    package = package_with_extension(tmp_path)
    (package / OWN / "_build_info.json").write_text('{"torch": "2.13.0"')
    assert str(package / OWN / "_build_info.json") in refusal(package)


def test_in_a_source_tree_the_rebuild_stays_editable(tmp_path):
    package = package_with_extension(tmp_path, torch="2.11.0")
    (tmp_path / "setup.py").touch()
    assert f"-e {tmp_path}`" in refusal(package)
