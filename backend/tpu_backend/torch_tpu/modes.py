"""When recorded operations are run, and whether programs are padded: settings of the whole process."""

from __future__ import annotations

from typing import NoReturn

from tpu_backend import _C, nan_check
from tpu_backend.environment import FIRST_MODE, MODES, PAD_SIZES, PARTS, current_mode
from tpu_backend.torch_tpu.devices import flush, is_initialized


class eager_mode:  # noqa: N801 - reads as a function
    """When recorded operations are run.

    - "debug": after each one, and the device waits for it.
    - "strict": after each one.
    - "fused": together, as one program, at natural boundaries.

    ``torch.tpu.eager_mode("strict")`` sets the mode for all threads of the process. As a context manager it
    restores the mode before. A process starts in fused mode with ``parts="first"``, or in the mode that the
    environment variable ``TPU_EAGER_MODE`` names.

    ``parts``, in fused mode: whether a long program is run in parts, which equal layers and their shares of
    the optimizer have in common. Parts compile sooner, and run somewhat slower than one program.

    - ``"never"``, the default here: always one program.
    - ``"first"``: in parts the first 256 times that a step is recorded alike. From the 32nd on a thread
      compiles the one program. Not under PyTorch's deterministic algorithms, since the last digits of sums
      may differ.
    - ``"prepare"``: in parts. From the second time on a thread compiles the one program, which runs when
      the mode is fused with ``parts="never"``.
    - ``"always"``: in parts.

    ``check_nans``, in debug mode: raise at the first operation whose result holds a NaN, naming it. The
    default is what ``TPU_DEBUG_NANS=1`` says.

    Raises ValueError for an unknown mode or value of ``parts``, and for an option of another mode.
    """

    def __init__(self, mode: str, *, check_nans: bool | None = None, parts: str | None = None):
        if mode not in MODES:
            raise ValueError(f"unknown eager mode {mode!r}: expected one of {', '.join(MODES)}")
        if check_nans and mode != "debug":
            raise ValueError(f'check_nans=True looks at every op, which mode {mode!r} does not: use "debug"')
        if parts is not None and parts not in PARTS:
            raise ValueError(f"unknown parts={parts!r}: expected one of {', '.join(PARTS)}")
        if parts not in (None, "never") and mode != "fused":
            raise ValueError(f'parts={parts!r} in mode {mode!r}: only "fused" runs steps in parts')
        options = {"check_nans": check_nans, "parts": parts}
        self._said = ", ".join(
            [repr(mode), *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        )
        self._before = _C.get_mode(), _C.parts()
        self._checked_before = nan_check.enabled()
        _end_segment()
        _set_mode(MODES.index(mode), PARTS.index(parts or "never"))
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
    """The mode that `eager_mode` has set: "debug", "strict" or "fused"."""
    return current_mode()


def get_parts() -> str:
    """Whether long programs are run in parts, as `eager_mode` has set it."""
    return PARTS[_C.parts()]


def _set_mode(mode: int, parts: int) -> None:
    _C.set_mode(mode)
    _C.set_parts(parts)


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


_C.set_pads_sizes(PAD_SIZES == "1")
if FIRST_MODE in MODES:
    eager_mode(FIRST_MODE)
elif FIRST_MODE is None:
    eager_mode("fused", parts="first")
