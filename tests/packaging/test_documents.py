"""The README is one page, its scripts run as they stand, and no link leads nowhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_one_page():
    assert len(README.split()) < 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text()), target


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    assert {page.name for page in PAGES[1:]} - {"index.md"} == set(re.findall(r"\]\((\w[\w-]*\.md)\)", index))


@pytest.mark.slow
def test_the_scripts_of_the_readme_run_as_they_stand(tmp_path: Path):
    scripts = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/circle/checkpoints/step-300").is_dir()
    assert float(done.stdout) > 0
