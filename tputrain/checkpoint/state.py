"""`state.json` of a checkpoint: everything that is no tensor, as one dict. Reading it needs no PyTorch."""

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from tputrain import exact_json
from tputrain.errors import UserError, is_out_of_memory

Owner = TypeVar("Owner")
Rest = ParamSpec("Rest")

STATE = "state.json"
FORMAT = 1  # raise when a reader of the old one would misread a checkpoint; new keys alone do not do that
_OURS = ("tputrain", "tpu_backend", "torch", "safetensors", "numpy", "jax", "jaxlib")
_NEEDED = {"step": int, "config": dict, "versions": dict}  # what every reader takes for granted


def state_text(state: dict[str, Any]) -> str:
    """What state.json holds: `state` and its format. Raises UserError where something in it is not JSON.

    It is valid JSON also where `state` holds NaN or an infinity: see `tputrain.exact_json`.
    """
    try:
        return exact_json.dumps({"format": FORMAT} | state, indent=1) + "\n"
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
        state = exact_json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); use another checkpoint") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    _check(path, state)
    _replace_auto(state)
    return state


def understood(
    load: Callable[Concatenate[Owner, Path, Rest], None],
) -> Callable[Concatenate[Owner, Path, Rest], None]:
    """A method that takes a checkpoint in: what it cannot make sense of there is one line, which names it.

    Checksums keep damage out; what is left is a checkpoint that somebody edited and sealed anew, or that
    another program wrote. An error of the user's own code (a callback's `load_state_dict`), or a lack of
    memory, says nothing about the checkpoint: it is raised as it is.
    """

    @wraps(load)
    def loading(owner: Owner, path: Path, *rest: Rest.args, **named: Rest.kwargs) -> None:
        try:
            load(owner, path, *rest, **named)
        except UserError as error:
            if str(path) in str(error):
                raise
            raise UserError(f"{path}: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            if is_out_of_memory(error) or _is_of_users_code(error):
                error.add_note(f"while {path} was loaded")
                raise
            said = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path}: it holds what this tputrain does not write ({type(error).__name__}: {said}); "
                "use another checkpoint (--debug shows where)"
            ) from error

    return loading


def _is_of_users_code(error: BaseException) -> bool:
    """Whether code that is neither of this package nor of those it stands on was running."""
    frames = traceback.walk_tb(error.__traceback__)
    modules = (str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame, _ in frames)
    return any(name not in sys.stdlib_module_names and name not in _OURS for name in modules)


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


def _replace_auto(state: dict[str, Any]) -> None:
    """The form auto is gone: its place takes fused, or what the checkpoint says that it had chosen."""
    forms, measured = state["config"].get("execution"), state.get("execution")
    if not isinstance(forms, dict):
        return
    chosen = measured.get("chosen") if isinstance(measured, dict) else None
    if forms.get("train") == "auto":
        forms["train"] = chosen or "fused"
    for phase in ("validate", "sample"):
        if forms.get(phase) == "auto":  # what training did
            forms[phase] = "fused" if forms.get("train") == "captured" else forms.get("train")
