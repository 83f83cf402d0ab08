"""What the Trainer adds to a hand-written loop, and what a background checkpoint costs the training.

* host time that the Trainer adds to a step of the recipe's Llama, with its default settings (watchdog,
  metrics on disk, log steps), at most 2 % of that step;
* the stall of a background checkpoint of the recipe's model (5 million parameters), from the end of a step
  until the next one begins, at most 0.1 s;
* steps while a checkpoint is being written, at most 5 % longer than others;
* the watchdog's part of a step.

The time added is measured on a twin of the model: as many layers, tensors and operations, but so narrow that
the host's work is what counts; in a step of the real one it would be lost in the noise of its arithmetic.
"""

import dataclasses
import faulthandler
import gc
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.benchmarks import torch_step
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing
from tputrain import Callback, CheckpointConfig, RunConfig, Trainer
from tputrain.loggers.logger import Record
from tputrain.models.llama import LlamaConfig
from tputrain.optim.optimizer import set_learning_rate
from tputrain.recipe import RecipeConfig, read_recipe
from tputrain.shipped import find_recipe
from tputrain.watchdog import STEP, Watchdog

LLAMA = torch_step.LLAMA
TWIN = dataclasses.replace(
    LLAMA, vocab_size=64, hidden_size=16, intermediate_size=16, head_dim=16 // LLAMA.num_attention_heads
)
NEVER = 10**9


class Loader:
    """The same batch again and again, as a recipe's loader gives it: a dict of tensors on the host."""

    def __init__(self, config: LlamaConfig, size: int, length: int):
        names = ("input_ids", "labels", "position_ids", "document_ids")
        arrays = torch_step.llama_batch(config, size, length)
        self.batch = dict(zip(names, map(torch.from_numpy, arrays), strict=True))

    def batch_at(self, step: int, micro: int) -> dict[str, Tensor]:
        return dict(self.batch)


class ReadTimes(Callback):
    """When each log step had been read; at those moments the device has nothing left to do."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_log(self, trainer: Trainer, records: list[Record]) -> None:
        self.times.append(time.perf_counter())


def configuration(run_dir: Path, log_every: int | None = None) -> RecipeConfig:
    """The recipe's, without evaluations; it saves when a fit ends. `log_every`: None is the default."""
    cfg = read_recipe(find_recipe("llama"))
    return dataclasses.replace(
        cfg,
        device="tpu",
        run_dir=str(run_dir),
        trainer=dataclasses.replace(cfg.trainer, evaluate_every=None),
        checkpoint=CheckpointConfig(every=None),
        log=dataclasses.replace(cfg.log, progress="none", every=log_every or cfg.log.every),
    )


class TrainerLoop:
    """Blocks of steps by the Trainer, each from one read of the values to the next."""

    def __init__(self, cfg: RunConfig, config: LlamaConfig, loader: Loader):
        self.reads = ReadTimes()
        model = torch_step.llama(config)
        self.trainer = Trainer(model, cfg, train_loader=loader, callbacks=[self.reads])

    def __call__(self, blocks: int) -> list[float]:
        """Seconds a step, of each block. The first block of a call is not counted: it begins a fit."""
        every = self.trainer.cfg.log.every
        steps = self.trainer.step + (blocks + 1) * every
        self.trainer.cfg = dataclasses.replace(
            self.trainer.cfg, trainer=dataclasses.replace(self.trainer.cfg.trainer, steps=steps)
        )
        self.reads.times.clear()
        self.trainer.fit()
        times = self.reads.times[-blocks - 1 :]
        return [(after - before) / every for before, after in pairwise(times)]


class HandWrittenLoop:
    """What one would write without the Trainer: the same model, optimizer, clipping, schedule and reads."""

    def __init__(self, cfg: RunConfig, config: LlamaConfig, loader: Loader):
        self.cfg, self.loader = cfg, loader
        self.model = torch_step.llama(config).to("tpu").train()
        self.optimizer = cfg.optim.build(self.model)
        self.parameters = list(self.model.parameters())
        self.step = 0

    def __call__(self, blocks: int) -> list[float]:
        with torch.tpu.eager_mode("fused"):
            self._block()
            return [self._block() for _ in range(blocks)]

    def _block(self) -> float:
        every, began = self.cfg.log.every, time.perf_counter()
        losses = []
        for _ in range(every):
            batch = {
                name: tensor.to("tpu", non_blocking=True)
                for name, tensor in self.loader.batch_at(self.step, 0).items()
            }
            loss = self.model(**batch)
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.cfg.trainer.max_grad_norm or 1.0)
            factor = self.cfg.schedule.factor(self.step, NEVER)
            set_learning_rate(self.optimizer, self.cfg.optim.learning_rate * factor)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            losses.append(loss.detach())
            torch.tpu.flush()
            self.step += 1
        for loss in losses:
            loss.item()
        return (time.perf_counter() - began) / every


def compared(
    config: LlamaConfig, size: int, length: int, *, rounds: int, blocks: int, log_every: int | None = None
) -> dict[str, Timing]:
    """Seconds a step of both loops, taking turns; the collector is off in both, as the Trainer has it."""
    with tempfile.TemporaryDirectory() as directory:
        cfg = configuration(Path(directory), log_every)
        loader = Loader(config, size, length)
        loops: dict[str, Callable[[int], list[float]]] = {
            "trainer": TrainerLoop(cfg, config, loader),
            "by hand": HandWrittenLoop(cfg, config, loader),
        }
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        for loop in loops.values():
            loop(1)
        names = list(loops)
        for turn in range(rounds):
            for name in names[turn % 2 :] + names[: turn % 2]:
                gc.collect()
                gc.disable()
                seconds[name] += loops[name](blocks)
                gc.enable()
        return {name: Timing(tuple(values)) for name, values in seconds.items()}


def overhead_rows() -> tuple[list[Row], float]:
    """The rows, and the seconds of the recipe's step."""
    twin = compared(TWIN, 8, 16, rounds=8, blocks=4)
    added = twin["trainer"].minimum - twin["by hand"].minimum
    # Short blocks, more of them: the fastest of a few long ones is a matter of luck.
    real = compared(LLAMA, torch_step.LLAMA_BATCH, torch_step.LLAMA_LENGTH, rounds=5, blocks=6, log_every=2)
    step = real["by hand"].minimum
    of_twin = f"{added * 1e6:.0f} µs a step ({twin['trainer']} - {twin['by hand']} of a narrow twin)"
    detail = f"{of_twin} / {step * 1e3:.0f} ms"
    directly = f"{real['trainer']} / {real['by hand']}"
    return [
        Row("Trainer: host time added / the recipe's step", added / step, "<=", 0.02, detail),
        Row(
            "Trainer / hand-written loop, the recipe's step",
            real["trainer"].minimum / step,
            "<=",
            1.05,
            directly,
        ),
    ], step


class Saves(Callback):
    """Asks for a checkpoint after each `every`th step; the device has nothing to do at the end of any."""

    def __init__(self, every: int):
        self.every = every
        self.gaps: dict[bool, list[float]] = {True: [], False: []}
        """Seconds from the end of a step to the next one's forward, by whether a save began in between."""
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        """Seconds of a step, by whether a checkpoint was being written when it began (more than one is)."""
        self._began_at, self._began_while_writing = 0.0, False
        self._ended_at: float | None = None
        self._saved = False

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.model.register_forward_pre_hook(self._begin)

    def _begin(self, model: nn.Module, inputs: object) -> None:
        self._began_at = time.perf_counter()
        self._began_while_writing = any(thread.name == "checkpoint" for thread in threading.enumerate())

    def on_step_end(self, trainer: Trainer) -> None:
        torch.tpu.synchronize()
        now = time.perf_counter()
        if self._ended_at is not None and trainer.step > 3:
            self.gaps[self._saved].append(self._began_at - self._ended_at)
            self.steps[self._began_while_writing].append(now - self._began_at)
        self._saved = trainer.step % self.every == 0
        trainer.control.save = self._saved
        self._ended_at = time.perf_counter()


def checkpoint_rows(saves: int = 3, every: int = 60) -> list[Row]:
    with tempfile.TemporaryDirectory() as directory:
        cfg = configuration(Path(directory))
        cfg = dataclasses.replace(cfg, trainer=dataclasses.replace(cfg.trainer, steps=every * (saves + 1)))
        loader = Loader(LLAMA, torch_step.LLAMA_BATCH, torch_step.LLAMA_LENGTH)
        counting = Saves(every)
        trainer = Trainer(torch_step.llama(), cfg, train_loader=loader, callbacks=[counting])
        trainer.fit()
    with_save, without = counting.gaps[True], counting.gaps[False]
    stall = statistics.median(with_save) - statistics.median(without)
    stalls = f"median of {len(with_save)}, which are {min(with_save):.3f} to {max(with_save):.3f}"
    while_writing, others = Timing(tuple(counting.steps[True])), Timing(tuple(counting.steps[False]))
    slowdown = statistics.median(while_writing.seconds) / statistics.median(others.seconds) - 1
    return [
        Row("background checkpoint: stall, s", stall, "<=", 0.1, stalls),
        Row(
            "background checkpoint: slowdown of steps while it is written",
            slowdown,
            "<=",
            0.05,
            f"medians of {len(while_writing.seconds)} and {len(others.seconds)}; {while_writing} / {others}",
        ),
    ]


def watchdog_row(step_seconds: float) -> Row:
    """Its phases, three a step, and its thread's look, once a second."""
    with tempfile.TemporaryDirectory() as directory:
        watchdog = Watchdog(RunConfig().watchdog, Path(directory), torch.device("tpu"), lambda: 0)
        calls = 20_000
        began = time.perf_counter()
        for _ in range(calls):
            with watchdog.phase(STEP):
                pass
        phase = (time.perf_counter() - began) / calls
        looks = []
        for _ in range(50):
            began = time.perf_counter()
            watchdog.look(1.0)
            looks.append(time.perf_counter() - began)
        faulthandler.cancel_dump_traceback_later()
    look = statistics.median(looks)
    a_step = 3 * phase + look * step_seconds
    detail = f"3 phases of {phase * 1e6:.1f} µs, and {look * 1e6:.0f} µs a second in its thread"
    return Row("watchdog: µs of the recipe's step", a_step * 1e6, "<=", 0.002 * step_seconds * 1e6, detail)


def rows() -> list[Row]:
    overhead, step_seconds = overhead_rows()
    return [*overhead, *checkpoint_rows(), watchdog_row(step_seconds)]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
