"""Which XLA platform "tpu" stands for in this process: TPU, CUDA or the embedded CPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from tpu_backend.chips import has_nvidia_gpu, tpu_chips
from tpu_backend.runtime import described

PLATFORMS = ("auto", "tpu", "cuda", "cpu")


@dataclass(frozen=True)
class Platform:
    name: str  # tpu, cuda or cpu
    reason: str
    devices: tuple[Any, ...]


def _holder_of(files: list[Path]) -> str:
    """Who has one of these files open, as far as /proc shows it."""
    wanted = {str(file) for file in files}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(handle) in wanted for handle in (process / "fd").iterdir()):
                name = (process / "comm").read_text().strip()
                return f"process {process.name} ({name}) holds them"
        except OSError:
            continue
    return "no holder could be found in /proc"


def _open_devices(name: str) -> tuple[Any, ...]:
    return tuple(jax.local_devices(backend="gpu" if name == "cuda" else name))


def _leave_tpu_closed(platforms: str) -> None:
    """Keep JAX from opening what is not wanted: chips would be held, and where there are none, libtpu
    searches for them and prints errors.  A choice that the user made for JAX stands.
    """
    if find_spec("libtpu") is not None and not jax.config.jax_platforms:  # type: ignore[attr-defined]
        jax.config.update("jax_platforms", platforms)


@cache
def platform() -> Platform:
    """Choose once.  ``TPU_PLATFORM=auto|tpu|cuda|cpu`` decides; auto takes TPU chips where there are any,
    else the CPU.

    Raises RuntimeError when what was asked for, or what is plainly there, cannot be opened: never a silent
    CPU.
    """
    asked = os.environ.get("TPU_PLATFORM", "auto")
    if asked not in PLATFORMS:
        raise RuntimeError(f"TPU_PLATFORM={asked!r}: expected one of {', '.join(PLATFORMS)}")
    chips = tpu_chips()
    if asked == "tpu" or (asked == "auto" and chips):
        try:
            devices = _open_devices("tpu")
        except RuntimeError as error:
            if not chips:
                raise RuntimeError(
                    "TPU_PLATFORM=tpu, but this machine shows no TPU chip (/dev/accel*, /dev/vfio/*); "
                    "unset TPU_PLATFORM to run on the CPU"
                ) from error
            raise RuntimeError(
                f"this machine has TPU chips ({', '.join(map(str, chips))}) that cannot be opened: "
                f"{_holder_of(chips)}. "
                "Install the runtime with pip install 'jax[tpu]' if it is missing, or set "
                "TPU_PLATFORM=cpu. "
                f"JAX says: {error}"
            ) from error
        return Platform("tpu", f"{len(devices)} TPU devices", devices)
    _leave_tpu_closed("cuda,cpu" if asked == "cuda" else "cpu")
    if asked == "cuda":
        try:
            devices = _open_devices("cuda")
        except RuntimeError as error:
            raise RuntimeError(
                "TPU_PLATFORM=cuda, but JAX finds no CUDA device; install it with pip install "
                "'jax[cuda13]'. "
                f"JAX says: {error}"
            ) from error
        return Platform("cuda", "TPU_PLATFORM=cuda", devices)
    reason = "TPU_PLATFORM=cpu" if asked == "cpu" else "no TPU found"
    if asked == "auto" and has_nvidia_gpu():
        reason += "; TPU_PLATFORM=cuda takes this machine's GPU"
    return Platform("cpu", reason, _open_devices("cpu")[:1])


def announce() -> None:
    """One line on standard error, by the first process of a machine: what "tpu" is here."""
    chosen = platform()  # on each rank: those that open theirs wait for it
    if os.environ.get("LOCAL_RANK", "0") != "0" or described.here is not None:
        return
    kind = chosen.devices[0].device_kind if chosen.name != "cpu" else "CPU"
    print(f"device tpu → XLA:{kind} ({chosen.reason})", file=sys.stderr, flush=True)
