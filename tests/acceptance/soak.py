"""A long run of a tiny model: nothing that a process holds may grow.

    python -m tests.acceptance.soak [--steps 5000] [key=value ...]

A Llama of 140,000 parameters on the tpu device, with everything that comes once in a while: log steps,
evaluations with a sample of text, background checkpoints, a callback. Memory, the device's bytes, threads,
open files and compiled programs are counted along the way, and the last fifth of the run is held against its
second fifth: the first is warm-up. Takes 3 to 5 minutes on 2 cores. Exits with 1 where a bar does not hold.

Memory is what the C library has handed out and not got back (with PYTHONMALLOC=malloc that is Python's
objects too), the least seen in either fifth, since XLA frees a step's temporaries, 10 MB here, some time
after its results are there. It may grow by half a KiB a step: a leak of one KiB fails, whatever it is of, and
the noise that is left, a few hundred KiB in 3,000 steps, passes (test_soak.py). Resident memory, where free
pages come and go as they like, is only looked at for what is not malloc's. Of everything else the most seen
in either must be the same.
"""

import argparse
import ctypes
import gc
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.acceptance.campaign import some_text
from tests.benchmarks.bars import Row, print_table
from tputrain import Callback, Trainer
from tputrain import device as devices
from tputrain.job import Recipe
from tputrain.loggers.logger import Record
from tputrain.recipe import read_recipe

SAMPLES = 250  # along the way
MIB = 2**20
RECIPE = """
device: tpu
run_dir: run
model:
  {name: llama-5m, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2,
   num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}
data: {files: text.txt, vocab_size: 512, sequence_length: 64, cache_dir: cache}
batch: {tokens: 512, sequences: 4}
trainer: {evaluate_every: 100, evaluate_batches: 4}
checkpoint: {every: 50}
log: {every: 10, progress: none}
sample: {max_new_tokens: 4}
"""


@dataclass(frozen=True)
class Held:
    """What the process holds at one moment."""

    step: int
    used_bytes: int
    resident_bytes: int
    device_bytes: int
    threads: int
    open_files: int
    programs: int


class AllocatorCounts(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer: in use are `uordblks` bytes of heaps, `hblkhd` mapped."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class CountWhatIsHeld(Callback):
    """Samples where values are read, of every `every`th step."""

    def __init__(self, every: int):
        self.every = every
        self.samples: list[Held] = []
        self.c_library = ctypes.CDLL(None)
        self.c_library.mallinfo2.restype = AllocatorCounts

    def on_log(self, trainer: Trainer, records: list[Record]) -> None:
        if trainer.step % self.every == 0:
            torch.tpu.synchronize()
            gc.collect()
            used, resident = self.least_memory()
            self.samples.append(
                Held(
                    trainer.step,
                    used,
                    resident,
                    devices.memory(trainer.device),
                    len(os.listdir("/proc/self/task")),
                    len(os.listdir("/proc/self/fd")),
                    devices.compilations(trainer.device),
                )
            )
            if len(self.samples) % 25 == 0:
                print(self.samples[-1], flush=True)

    def least_memory(self) -> tuple[int, int]:
        """Bytes in use and bytes resident, each the least of a few looks."""
        used, resident = [], []
        for _ in range(5):
            time.sleep(0.02)
            self.c_library.malloc_trim(0)
            counts = self.c_library.mallinfo2()
            used.append(counts.uordblks + counts.hblkhd)
            resident.append(devices.memory(torch.device("cpu")))
        return min(used), min(resident)


def main() -> int:
    options = parse_arguments()
    if os.environ.get("PYTHONMALLOC") != "malloc":
        os.environ["PYTHONMALLOC"] = "malloc"  # read once, when Python starts
        os.execv(sys.executable, [sys.executable, "-m", "tests.acceptance.soak", *sys.argv[1:]])
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        os.chdir(work)
        Path("text.txt").write_text(some_text())
        Path("soak.yaml").write_text(RECIPE)
        cfg = read_recipe(Path("soak.yaml"), [f"trainer.steps={options.steps}", *options.overrides])
        trainer = Recipe(cfg).build_from(None)
        counting = CountWhatIsHeld(max(1, options.steps // SAMPLES))
        trainer.callbacks.append(counting)
        trainer.fit()
        os.chdir("/")
    print()
    return 0 if print_table(bars(counting.samples)) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.soak", description=__doc__.split("\n")[0]
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings for the run")
    parser.add_argument("--steps", type=int, default=5000, help="default: 5000")
    options = parser.parse_args()
    if options.steps < 500:
        parser.error(f"--steps {options.steps}: expected at least 500, or there is no fifth to compare")
    return options


def bars(samples: list[Held]) -> list[Row]:
    fifth = len(samples) // 5
    early, late = samples[fifth : 2 * fifth], samples[-fifth:]
    steps = late[0].step - early[0].step
    used, used_late = (min(held.used_bytes for held in part) for part in (early, late))
    resident, resident_late = (min(held.resident_bytes for held in part) for part in (early, late))
    rows = [
        Row(
            "memory in use: growth, KiB a step",
            (used_late - used) / 1024 / steps,
            "<=",
            0.5,
            f"{used / MIB:.2f} to {used_late / MIB:.2f} MiB in {steps} steps",
        ),
        Row(
            "resident memory: growth",
            resident_late / resident - 1,
            "<=",
            0.02,
            f"{resident / MIB:.1f} to {resident_late / MIB:.1f} MiB",
        ),
    ]
    for name in ("device_bytes", "threads", "open_files", "programs"):
        first, last = (max(getattr(held, name) for held in part) for part in (early, late))
        rows.append(Row(f"{name.replace('_', ' ')}: growth", last - first, "<=", 0, f"{first} to {last}"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
