"""docs/migrate.md: every block of Python in it runs on the device, section by section."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrate.md"


def _sections() -> dict[str, list[str]]:
    """The blocks of each section, which share their names, as a reader would paste them."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        found[section.splitlines()[0]] = blocks
    return found


SECTIONS = _sections()


def test_every_section_has_code():
    assert {name: len(blocks) for name, blocks in SECTIONS.items() if not blocks} == {}
    assert sum(map(len, SECTIONS.values())) == PAGE.read_text().count("```python")


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.filterwarnings("error:.*has no tpu lowering")
def test_the_snippets_run(section, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(SECTIONS[section]):
        exec(compile(block, f"{PAGE.name}, {section}, block {number + 1}", "exec"), scope)
