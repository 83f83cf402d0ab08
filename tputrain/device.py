"""The Trainer's view of a device: which one, in which mode, and the few things only the tpu device has.

Everything that asks "is this tpu?" is here; on any other device the same calls do what is natural there.
"""

import resource
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from tputrain.config_checks import expect_choice
from tputrain.errors import UserError

DEVICES = ("auto", "tpu", "cpu")
MODES = ("debug", "strict", "fused")


@dataclass(frozen=True)
class ExecutionConfig:
    """When the tpu device cuts its op stream: after each op and waiting (debug), after each op, or fused."""

    train: str = "fused"
    """Mode of training steps."""
    validate: str = "fused"
    """Mode of evaluations."""

    def __post_init__(self) -> None:
        expect_choice("execution.train", self.train, MODES)
        expect_choice("execution.validate", self.validate, MODES)


def find_device(name: str) -> torch.device:
    """The device a configuration names; `auto` is tpu, which is XLA on whatever this machine has."""
    if name == "cpu":
        return torch.device("cpu")
    if not hasattr(torch, "tpu"):
        raise UserError(
            f"device={name}: this PyTorch has no tpu device (tpu_backend is not installed or was not built); "
            "install it with `pip install .`, or set device=cpu"
        )
    return torch.device("tpu")


def execution_mode(device: torch.device, mode: str) -> AbstractContextManager[object]:
    """The context in which the device runs in `mode`; elsewhere there is but one mode."""
    return torch.tpu.eager_mode(mode) if device.type == "tpu" else nullcontext()  # type: ignore[attr-defined]


def flush(device: torch.device) -> None:
    """Dispatch everything recorded so far as one program, without waiting for it."""
    if device.type == "tpu":
        torch.tpu.flush()  # type: ignore[attr-defined]


def compilations(device: torch.device) -> int:
    """Programs compiled by this process so far."""
    return torch.tpu.compile_stats()["compilations"] if device.type == "tpu" else 0  # type: ignore[attr-defined]


def is_compiling() -> bool:
    """Whether some thread of this process is compiling a program right now; asks no lock and no device."""
    for frame in sys._current_frames().values():
        looked_at = frame
        while looked_at is not None:
            code = looked_at.f_code
            if code.co_name == "compile_segment" and "tpu_backend" in code.co_filename:
                return True
            looked_at = looked_at.f_back  # type: ignore[assignment]
    return False


def describe_stream(device: torch.device) -> str:
    """How far the device's stream has come, for a report on a hang. May wait for whoever holds the stream."""
    if device.type != "tpu":
        return f"{device}: runs in the threads above"
    return f"{device}: {torch.tpu.compile_stats()}"  # type: ignore[attr-defined]


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that was allocated on the device; on the cpu, the most this process held."""
    if device.type == "tpu":
        return torch.tpu.max_memory_allocated()  # type: ignore[attr-defined]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def rng_state(device: torch.device) -> torch.Tensor | None:
    """The device generator's state (uint8), or None where the cpu's generator is the only one."""
    return torch.tpu.get_rng_state() if device.type == "tpu" else None  # type: ignore[attr-defined]


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Put back what `rng_state` gave."""
    torch.tpu.set_rng_state(state)  # type: ignore[attr-defined]
