"""`state.json` of a checkpoint: everything that is no tensor, as one dict. Reading it needs no PyTorch."""

import json
from pathlib import Path
from typing import Any

from tputrain.errors import UserError

STATE = "state.json"
FORMAT = 1  # raise when a reader of the old one would misread a checkpoint; new keys alone do not do that
_NEEDED = {"step": int, "config": dict, "versions": dict}  # what every reader takes for granted


def state_text(state: dict[str, Any]) -> str:
    """What state.json holds: `state` and its format. Raises UserError where something in it is not JSON."""
    try:
        return json.dumps({"format": FORMAT} | state, indent=1) + "\n"
    except TypeError as error:
        raise UserError(f"{STATE}: {error}; state of callbacks and schedulers must be plain JSON") from None


def write_state(text: str, directory: Path) -> None:
    """Write state.json."""
    (directory / STATE).write_text(text, encoding="utf-8")


def load_state(directory: Path) -> dict[str, Any]:
    """Read state.json of a verified checkpoint. Raises UserError where this tputrain cannot use what it says.

    A checksum shows that a file is as it was sealed, not that tputrain wrote it.
    """
    path = directory / STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); use another checkpoint") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    _check(path, state)
    return state


def _check(path: Path, state: Any) -> None:
    if not isinstance(state, dict) or type(state.get("format")) is not int:
        raise UserError(f"{path}: no checkpoint of tputrain (it says no format); use another checkpoint")
    if state["format"] > FORMAT:
        versions = state.get("versions")
        writer = versions.get("tputrain", "?") if isinstance(versions, dict) else "?"
        raise UserError(
            f"{path}: format {state['format']}, written by tputrain {writer}; "
            f"this one reads formats up to {FORMAT}: install that version, or a newer one"
        )
    for key, kind in _NEEDED.items():
        if type(state.get(key)) is not kind:
            raise UserError(f"{path}: {key} is missing or no {kind.__name__}; use another checkpoint")
