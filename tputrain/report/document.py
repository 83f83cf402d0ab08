"""An HTML document that needs no other file and no network."""

from html import escape
from pathlib import Path

from tputrain.announce import say
from tputrain.errors import UserError
from tputrain.report.page_files import page_file


def document(title: str, body: str, has_charts: bool = False) -> str:
    """`body` with the style sheet; `has_charts`: and with the script of line charts. The title is escaped."""
    script = f"<div id=tip hidden></div><script>{page_file('hover.js')}</script>" if has_charts else ""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{page_file('style.css')}</style></head>"
        f"<body><main>{body}</main>{script}</body></html>\n"
    )


def write_page(path: Path, page: str, what: str) -> None:
    """Write the page, of `what`, and say so. Raises UserError where that fails."""
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file") from None
    say(f"{path}: {what}, {path.stat().st_size / 1e3:.0f} kB")
