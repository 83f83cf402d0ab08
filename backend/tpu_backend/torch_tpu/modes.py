"""When the op stream is cut, and whether programs are padded. A setting holds for the whole process."""

from __future__ import annotations

import os
from typing import NoReturn

from tpu_backend import _C, nan_check
from tpu_backend.torch_tpu.devices import flush, is_initialized

_MODES = ("debug", "strict", "fused", "layered")


class eager_mode:  # noqa: N801 - reads as a function
    """When the op stream is cut into programs.

    - "debug": after each op, and the device waits for it.
    - "strict": after each op.
    - "fused": at natural boundaries. With ``first="layered"``, a step that repeats is layered the first 256
      times that it is recorded alike; at the 32nd a thread begins to compile the one program. This does not
      happen while PyTorch is asked for deterministic algorithms, since sums may differ in the last digits.
    - "layered": at natural boundaries and where the stream repeats. The layers of a model, and a layer's
      share of the optimizer, are equal parts that share a program. Compiling takes the time of one part;
      the parts run somewhat slower than one program. With ``then="fused"``, when a step is recorded alike
      for the second time, a thread begins to compile the one program that fused mode will run.

    A process starts with ``eager_mode("fused", first="layered")``, or in the mode that the environment
    variable ``TPU_EAGER_MODE`` names.

    ``torch.tpu.eager_mode("strict")`` sets the mode; as a context manager it restores the mode before.
    ``check_nans`` makes debug mode raise at the first op whose result holds a NaN, naming it. The default is
    what ``TPU_DEBUG_NANS=1`` says. Raises ValueError for another name, and for an option that does not fit
    the mode.
    """

    def __init__(
        self,
        mode: str,
        *,
        check_nans: bool | None = None,
        then: str | None = None,
        first: str | None = None,
    ):
        if mode not in _MODES:
            raise ValueError(f"unknown eager mode {mode!r}: expected one of {', '.join(_MODES)}")
        if check_nans and mode != "debug":
            raise ValueError(f'check_nans=True looks at every op, which mode {mode!r} does not: use "debug"')
        if then is not None and (mode, then) != ("layered", "fused"):
            raise ValueError(f'then={then!r} after mode {mode!r}: expected "fused" after "layered"')
        if first is not None and (mode, first) != ("fused", "layered"):
            raise ValueError(
                f'mode {mode!r} with first={first!r}: there is only "fused" with first="layered"'
            )
        options = {"check_nans": check_nans, "then": then, "first": first}
        self._said = ", ".join(
            [repr(mode), *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        )
        self._before = _C.get_mode(), _C.compiles_ahead(), _C.begins_layered()
        self._checked_before = nan_check.enabled()
        _end_segment()
        _set_mode(_MODES.index(mode), then is not None, first is not None)
        if check_nans is not None:
            nan_check.enable(check_nans)

    def __repr__(self) -> str:
        return f"torch.tpu.eager_mode({self._said})"

    def __call__(self, *_: object) -> NoReturn:
        self.__exit__()
        raise TypeError(
            "torch.tpu.eager_mode is no decorator: write `with torch.tpu.eager_mode(...):` in the function"
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        try:
            _end_segment()
        finally:
            _set_mode(*self._before)
            nan_check.enable(self._checked_before)


def get_eager_mode() -> str:
    return _MODES[_C.get_mode()]


def _set_mode(mode: int, compiles_ahead: bool, begins_layered: bool) -> None:
    _C.set_mode(mode)
    _C.set_compiles_ahead(compiles_ahead)
    _C.set_begins_layered(begins_layered)


def _end_segment() -> None:
    """Run what was recorded in the mode before, and remember which Python line changes the mode."""
    if is_initialized():
        flush()
        from tpu_backend.runtime.user_line import remember_line_of_mode

        remember_line_of_mode()


class pad_sizes:  # noqa: N801 - reads as a function
    """Whether sizes that grow from call to call share padded programs, without gradients (docs/execution.md).

    The last digits of a result may then depend on which sizes came before. ``torch.tpu.pad_sizes(False)``
    switches it off for all threads; as a context manager it restores the setting before. A process starts
    with it on, unless the environment variable ``TPU_PAD_SIZES`` is 0.
    """

    def __init__(self, enabled: bool):
        self._before = _C.pads_sizes()
        _set_pads_sizes(enabled)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        _set_pads_sizes(self._before)


def get_pad_sizes() -> bool:
    return _C.pads_sizes()


def _set_pads_sizes(enabled: bool) -> None:
    if is_initialized() and enabled != _C.pads_sizes():
        flush()  # what was recorded before runs with the setting before
    _C.set_pads_sizes(enabled)


_pad_sizes = os.environ.get("TPU_PAD_SIZES") or "1"
_C.set_pads_sizes(_pad_sizes == "1")
_first_mode = os.environ.get("TPU_EAGER_MODE") or None
if _first_mode in _MODES:
    eager_mode(_first_mode)
elif _first_mode is None:
    eager_mode("fused", first="layered")


def check_environment() -> None:
    """Raise RuntimeError for an unknown value of a variable: at first use, since `import torch` must work."""
    if _first_mode not in (None, *_MODES):
        raise RuntimeError(f"TPU_EAGER_MODE={_first_mode!r}: expected one of {', '.join(_MODES)}")
    if _pad_sizes not in ("0", "1"):
        raise RuntimeError(f"TPU_PAD_SIZES={_pad_sizes!r}: expected 1 (pad where it is proven) or 0 (never)")
    if (asked := os.environ.get("TPU_DEBUG_NANS", "0")) not in ("", "0", "1"):
        raise RuntimeError(f"TPU_DEBUG_NANS={asked!r}: expected 1 (debug mode raises at the first NaN) or 0")
