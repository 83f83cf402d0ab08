"""What one operator costs the host: recorded (fused mode), and run as a program of its own (strict mode).

Bars: recording at most 1.2x native CPU eager; a strict operator at most 6x (JAX's own call is 4x to 5x of
native).  A round takes a few hundredths of a second, and a shared machine is slow for seconds at a time: many
rounds let each target meet a quiet moment.
"""

import sys
import time

import torch
from torch import Tensor

from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing, interleave

CHAIN = 100  # operators in one call of a target


def chain(x: Tensor, y: Tensor) -> Tensor:
    """CHAIN operators, each on the result of the one before: none is dead, none can be skipped."""
    for _ in range(CHAIN // 4):
        x = torch.relu(x + y) * 0.5 - y
    return x


class Native:
    """Chains on the CPU, as PyTorch runs them."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(32, 32), torch.randn(32, 32)

    def __call__(self, calls: int) -> None:
        for _ in range(calls):
            chain(self.x, self.y)


class Strict:
    """Chains on the device in strict mode, until the last result is there."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(32, 32).to("tpu"), torch.randn(32, 32).to("tpu")

    def __call__(self, calls: int) -> None:
        with torch.tpu.eager_mode("strict"):
            for _ in range(calls):
                chain(self.x, self.y)
            torch.tpu.synchronize()


class Recording:
    """Chains on the device in fused mode; the clock runs while they are recorded, not while they run."""

    def __init__(self) -> None:
        self.x, self.y = torch.randn(32, 32).to("tpu"), torch.randn(32, 32).to("tpu")
        self.seconds: list[float] = []

    def __call__(self, calls: int) -> None:
        seconds = 0.0
        with torch.tpu.eager_mode("fused"):
            for _ in range(calls):
                torch.tpu.synchronize()
                start = time.perf_counter()
                result = chain(self.x, self.y)
                seconds += time.perf_counter() - start
                torch.tpu.flush()
                del result
            torch.tpu.synchronize()
        self.seconds.append(seconds / calls)

    def timing(self, rounds: int) -> Timing:
        """The recording time of the last `rounds` calls of this target, in seconds a chain."""
        return Timing(tuple(self.seconds[-rounds:]))


def rows(rounds: int = 60) -> list[Row]:
    recording = Recording()
    timings = interleave(
        {"native": Native(), "strict": Strict(), "recording": recording}, calls=20, rounds=rounds
    )
    timings["recording"] = recording.timing(rounds)
    native = timings["native"]

    def against_native(name: str) -> tuple[float, str]:
        timing = timings[name]
        per_operator = Timing(tuple(seconds / CHAIN for seconds in timing.seconds))
        native_per_operator = Timing(tuple(seconds / CHAIN for seconds in native.seconds))
        return timing.minimum / native.minimum, f"{per_operator} an op, native {native_per_operator}"

    recorded, recorded_detail = against_native("recording")
    strict, strict_detail = against_native("strict")
    return [
        Row("record an op / native op", recorded, "<=", 1.2, recorded_detail),
        Row("strict op / native op", strict, "<=", 6.0, strict_detail),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
