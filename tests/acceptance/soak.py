"""A long run of a tiny model: nothing that a process holds may grow.

    python -m tests.acceptance.soak [--steps 5000] [key=value ...]

A Llama of 140,000 parameters on the tpu device, with everything that comes once in a while: log steps,
evaluations with a sample of text, background checkpoints, a callback. Memory, the device's bytes, threads,
open files and compiled programs are counted along the way, and the last fifth of the run is held against its
second fifth: the first is warm-up. Takes 3 to 5 minutes on 2 cores. Exits with 1 where a bar does not hold.

Of resident memory the least that was seen in either counts, after the C library gave back what is free
(malloc_trim): a step's temporaries, 10 MB here, come and go in whichever thread's arena, and are often still
there when the step's loss was read. (Heap, mapped files and anonymous maps stay the same to the tenth of a
megabyte.) It may grow by 2 % and by 2 KiB a step. Of everything else the most that
was seen in either must be the same.
"""

import argparse
import ctypes
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.acceptance.fault_campaign import some_text
from tests.benchmarks.bars import Row, print_table
from tputrain import Callback, Trainer
from tputrain import device as devices
from tputrain.cli.job import build_job
from tputrain.loggers.logger import Record
from tputrain.recipe import load_recipe

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
    resident_bytes: int
    device_bytes: int
    threads: int
    open_files: int
    programs: int


class CountWhatIsHeld(Callback):
    """Samples where values are read, of every `every`th step."""

    def __init__(self, every: int):
        self.every = every
        self.samples: list[Held] = []
        self.c_library = ctypes.CDLL(None)

    def on_log(self, trainer: Trainer, records: list[Record]) -> None:
        if trainer.step % self.every == 0:
            torch.tpu.synchronize()
            self.samples.append(
                Held(
                    trainer.step,
                    self.least_resident_bytes(),
                    devices.memory(trainer.device),
                    len(os.listdir("/proc/self/task")),
                    len(os.listdir("/proc/self/fd")),
                    devices.compilations(trainer.device),
                )
            )
            if len(self.samples) % 25 == 0:
                print(self.samples[-1], flush=True)

    def least_resident_bytes(self) -> int:
        """Of a few looks: XLA's threads free a step's temporaries some time after its results are there."""
        looks = []
        for _ in range(5):
            time.sleep(0.02)
            self.c_library.malloc_trim(0)
            looks.append(devices.memory(torch.device("cpu")))
        return min(looks)


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        os.chdir(work)
        Path("text.txt").write_text(some_text())
        Path("soak.yaml").write_text(RECIPE)
        cfg = load_recipe(Path("soak.yaml"), [f"trainer.steps={options.steps}", *options.overrides])
        job = build_job(cfg)
        counting = CountWhatIsHeld(max(1, options.steps // SAMPLES))
        job.trainer.callbacks.append(counting)
        job.trainer.fit()
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
    before, after = (min(held.resident_bytes for held in part) for part in (early, late))
    steps = late[0].step - early[0].step
    detail = f"{before / MIB:.1f} to {after / MIB:.1f} MiB"
    rows = [
        Row("resident memory: growth", after / before - 1, "<=", 0.02, detail),
        Row("resident memory: KiB a step", (after - before) / 1024 / steps, "<=", 2.0, f"{steps} steps"),
    ]
    for name in ("device_bytes", "threads", "open_files", "programs"):
        first, last = (max(getattr(held, name) for held in part) for part in (early, late))
        rows.append(Row(f"{name.replace('_', ' ')}: growth", last - first, "<=", 0, f"{first} to {last}"))
    return rows


if __name__ == "__main__":
    sys.exit(main())
