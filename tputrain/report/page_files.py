"""The style sheet and the script of a report, which lie here as files."""

from importlib.resources import files


def page_file(name: str) -> str:
    """The text of `style.css` or `hover.js`."""
    return files("tputrain.report").joinpath(name).read_text(encoding="utf-8")
