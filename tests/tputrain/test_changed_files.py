"""A run whose text has changed since it began is told which files."""

import os
from pathlib import Path

import pytest

from tputrain.data import DataConfig, DataError

LINES = "".join(f"line {number} of a text that is long enough\n" for number in range(200))


def config(**changes) -> DataConfig:
    return DataConfig(**{"sequence_length": 16, "vocab_size": 300, "cache_dir": "cache", **changes})


def build(expected: str | None = None, **changes) -> str:
    return config(**changes).build(0, announce=lambda line: None, expected=expected).fingerprint


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/d.txt"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n{LINES}")
    return tmp_path / "text"


def edit(path: Path) -> None:
    path.write_text(path.read_text() + "one more line\n")


def edit_at_the_same_length(path: Path) -> None:
    path.write_text(path.read_text().replace("line 7", "LINE 7"))
    os.utime(path, (1, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: edit(text / "b.txt"), r"started with \(b.txt is changed\); restore the files"),
        (lambda text: edit_at_the_same_length(text / "sub/d.txt"), r"\(sub/d.txt is changed\)"),
        (lambda text: (text / "a.txt").unlink(), r"\(a.txt is gone\)"),
        (
            lambda text: [edit(text / each) for each in ("a.txt", "b.txt", "sub/c.txt", "sub/d.txt")],
            r"\(a.txt, b.txt, sub/c.txt and 1 more are changed\)",
        ),
        (
            lambda text: (text / "b.txt").rename(text / "e.txt"),
            r"\(b.txt is gone, e.txt is new\)",
        ),
    ],
)
def test_the_files_that_changed_are_named(directory: Path, change, message: str):
    begun_with = build(files="text/**/*.txt")
    assert build(begun_with, files="text/**/*.txt") == begun_with
    change(directory)
    with pytest.raises(DataError, match=message) as caught:
        build(begun_with, files="text/**/*.txt")
    assert "\n" not in str(caught.value)


def test_a_text_that_was_moved_is_the_same_and_without_the_cache_nothing_is_named(directory: Path):
    begun_with = build(files="text/**/*.txt")
    directory.rename(moved := directory.parent / "moved")
    assert build(begun_with, files="moved/**/*.txt") == begun_with
    edit(moved / "b.txt")
    with pytest.raises(DataError, match=r"\(b.txt is changed\)"):
        build(begun_with, files="moved/**/*.txt")
    with pytest.raises(DataError, match="what this run was started with; restore the files"):
        build(begun_with, files="moved/**/*.txt", cache_dir="empty")
