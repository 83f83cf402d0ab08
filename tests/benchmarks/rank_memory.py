"""The memory of each of two ranks that train a model of 400 MB: the device's, the host's above an idle rank.

`python -m tests.benchmarks.rank_memory`. What is allowed: the shard (parameters and optimizer state) and the
largest parameter; while saving one copy of the shard on the host beside it. The device "CPU" has its bytes on
the host, so that there what is allowed on the host is that of both. An idle rank has trained a tiny model:
it has all libraries, and XLA's compiler. What a process has freed is not to count: glibc would keep hundreds
of MB of the temporaries of XLA's steps on a CPU, so here it gives each large block back.
"""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed as dist

from tputrain import Callback, RunConfig, Trainer, TrainerConfig
from tputrain.checkpoint.store import CheckpointConfig
from tputrain.loggers.config import LogConfig
from tputrain.models import ModelConfig, initialize, parameters_on_meta
from tputrain.parallel.config import ParallelConfig

RANKS = 2
MODEL = ModelConfig("llama-100m")
TINY = ModelConfig("llama-100m", vocab_size=64, hidden_size=24, intermediate_size=16, num_hidden_layers=1)
MIB = 2**20
FREEING = {"MALLOC_MMAP_THRESHOLD_": str(MIB // 4), "MALLOC_MMAP_MAX_": "1000000"}


class Batches:
    def batch_at(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(RANKS * 16).view(RANKS, 16) + step
        return {"input_ids": ids, "labels": ids + 1}


class Peaks(Callback):
    """Prints what there was at most since the last time, and what there is."""

    def __init__(self, start: str, shard: int, largest: int):
        self._start, self._shard, self._largest = start, shard, largest
        self._idle = _status("VmRSS")
        self._forget()

    def on_fit_start(self, trainer: Trainer) -> None:
        self._look(self._start)

    def on_step_end(self, trainer: Trainer) -> None:
        self._look(f"step {trainer.step}")

    def on_save(self, trainer: Trainer, checkpoint: Path) -> None:
        self._look("save", copies=1)

    def _look(self, what: str, copies: int = 0) -> None:
        torch.tpu.synchronize()
        stats, is_cpu = torch.tpu.memory_stats(), "cpu" in torch.tpu.get_device_name().lower()
        bar = self._shard + self._largest
        host_bar = (copies + is_cpu) * self._shard + self._largest
        figures = (
            ("device", stats["allocated_bytes.all.peak"], stats["live_bytes"], bar),
            ("host above idle", _status("VmHWM") - self._idle, _status("VmRSS") - self._idle, host_bar),
        )
        line = "; ".join(
            f"{where} {peak / MIB:5.0f} MiB at most, then {now / MIB:5.0f} (allowed {allowed / MIB:.0f})"
            for where, peak, now, allowed in figures
        )
        print(f"rank {dist.get_rank()} {what:6}: {line}", flush=True)
        self._forget()

    def _forget(self) -> None:
        torch.tpu.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.findall(rf"{key}:\s+(\d+) kB", text)[0]) * 1024


def train(model_config: ModelConfig, run_dir: Path, steps: int, start: str | None) -> None:
    with parameters_on_meta():
        model = model_config.build_empty()
    sizes = [4 * parameter.numel() for parameter in model.parameters()]
    callbacks = [] if start is None else [Peaks(start, 3 * sum(sizes) // RANKS, max(sizes))]
    if start == "init" and dist.get_rank() == 0:
        print(f"{model_config.name}: parameters {sum(sizes) / MIB:.0f} MiB, AdamW's state twice that")
    cfg = RunConfig(
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=steps),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=1, progress="none"),
        parallel=ParallelConfig(shard=RANKS),
    )
    fill = partial(initialize, seed=0)
    Trainer(model, cfg, train_loader=Batches(), callbacks=callbacks, initialize=fill).fit()


def rank(start: str, directory: Path) -> None:
    """What each rank runs: `start` is init, or load of what the ranks before it have saved."""
    train(TINY, directory / f"tiny-{start}", 1, None)
    train(MODEL, directory / "run", 3 if start == "init" else 4, start)
    dist.destroy_process_group()


def main() -> int:
    with TemporaryDirectory() as directory:
        for start in ("init", "load"):
            launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
            module = ["-m", "tests.benchmarks.rank_memory", start, directory]
            if code := subprocess.run([*launched, *module], env=os.environ | FREEING, check=False).returncode:
                return code
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rank(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
