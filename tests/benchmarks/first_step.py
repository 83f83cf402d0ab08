"""The first training step of a process, of the 5M Llama: from recording it to its end.

* cold, with nothing on disk: at most the time that hand-written JAX takes for its own, which is traced,
  lowered and compiled too; as a script begins, with first steps in parts; as the Trainer's run
  begins, in parts with threads that compile the one program; and in fused mode by its name;
* with a warm executable cache: at most 1.5 s, and nothing is compiled;
* of 32 layers, as a script and as a run begins: at most 1.5 times that of 4. A batch of one sequence, so
  that the arithmetic, which is eight times as much, does not decide. With it, how long threads compile the
  fused program of 32.

Each figure is of a fresh process, after its imports and with model and optimizer's state on the device; they
take turns. JAX's own compilation cache is off in all of them.
"""

import dataclasses
import json
import sys
import tempfile
import time
from pathlib import Path

from tests.backend.fresh_process import found_by
from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing

MODES = {
    "fused": {"mode": "fused"},
    "script": {"mode": "fused", "parts": "first"},
    "run": {"mode": "fused", "parts": "prepare"},
}


def device_step(mode: str = "fused", layers: int = 4, size: int = 8) -> dict[str, float]:
    """Seconds of the first step on the tpu device in one of MODES, and where its program came from. Of a run
    also what threads take for the program of fused mode.
    """
    import torch

    from tests.benchmarks import torch_step
    from tputrain.optim.optimizer import create_state

    config = dataclasses.replace(torch_step.LLAMA, num_hidden_layers=layers)
    batch = torch_step.llama_batch(config, size)
    step = torch_step.TrainingStep(torch_step.llama(config), torch_step.llama_loss, batch, "tpu")
    create_state(step.optimizer)
    torch.tpu.synchronize()

    def timed() -> float:
        began = time.perf_counter()
        step()
        torch.tpu.synchronize()
        return time.perf_counter() - began

    before = dict(torch.tpu.compile_stats())
    with torch.tpu.eager_mode(**MODES[mode]):
        found = {"seconds": timed()}
        after = torch.tpu.compile_stats()
        for name in ("compilations", "disk_hits", "compile_seconds"):
            found[name] = after[name] - before[name]
        found["second step"] = timed()
    if mode == "run":
        while torch.tpu.is_compiling_ahead():
            time.sleep(0.05)
        whole = max(torch.tpu.compilations(), key=lambda program: len(program.operations))
        found["fused program"] = whole.seconds
    return found


def jax_step() -> dict[str, float]:
    """Seconds of the first step of the hand-written JAX."""
    from tests.benchmarks import jax_reference, torch_step
    from tests.benchmarks.jax_target import JaxSteps

    step = JaxSteps(
        jax_reference.initial_state(torch_step.llama()),
        jax_reference.llama_loss(torch_step.LLAMA),
        torch_step.llama_batch(),
    )
    began = time.perf_counter()
    step(1)
    return {"seconds": time.perf_counter() - began}


def in_a_fresh_process(cache: Path, which: str, *arguments: object) -> dict[str, float]:
    """What `device_step` or `jax_step` found."""
    environment = {"JAX_COMPILATION_CACHE_DIR": None, "TPU_CACHE_DIR": str(cache)}
    return found_by("tests.benchmarks.first_step", which, *arguments, **environment)


def rows(rounds: int = 5) -> list[Row]:
    cold, jax, warm = [], [], []
    begun: dict[tuple[str, int, int], list[dict[str, float]]] = {}  # by mode, layers and batch size
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            cache = Path(directory)
            cold.append(in_a_fresh_process(cache, "device"))
            jax.append(in_a_fresh_process(cache, "jax"))
            warm.append(in_a_fresh_process(cache, "device"))
        for mode in ("script", "run"):
            for layers, size in ((4, 8), (4, 1), (32, 1)):  # the first as in JAX
                with tempfile.TemporaryDirectory() as directory:
                    found = in_a_fresh_process(Path(directory), "device", mode, layers, size)
                begun.setdefault((mode, layers, size), []).append(found)

    def timing(found: list[dict[str, float]], what: str = "seconds") -> Timing:
        return Timing(tuple(each[what] for each in found))

    def begin_rows(mode: str) -> list[Row]:
        like_jax, few, many = (timing(begun[mode, *each]) for each in ((4, 8), (4, 1), (32, 1)))
        second = min(each["second step"] for each in begun[mode, 32, 1])
        remark = f"; its second {second:.2f} s"
        if mode == "run":
            fused = timing(begun[mode, 32, 1], "fused program")
            remark += f"; the fused program of 32, in the background: {fused}"
        return [
            Row(
                f"Llama, first step as a {mode} begins, cold / JAX",
                like_jax.minimum / timing(jax).minimum,
                "<=",
                1.0,
                f"{like_jax} / {timing(jax)}",
            ),
            Row(
                f"Llama, first step as a {mode} begins, 32 layers / 4",
                many.minimum / few.minimum,
                "<=",
                1.5,
                f"{many} / {few}{remark}",
            ),
        ]

    second = min(each["second step"] for each in warm)
    programs = sum(each["disk_hits"] for each in warm)
    return [
        *begin_rows("script"),
        *begin_rows("run"),
        Row(
            "Llama, first step in fused mode, cold / JAX",
            timing(cold).minimum / timing(jax).minimum,
            "<=",
            1.0,
            f"{timing(cold)} / {timing(jax)}",
        ),
        Row(
            "Llama, first step with a warm executable cache, s",
            timing(warm).minimum,
            "<=",
            1.5,
            f"{timing(warm)}; the second takes {second * 1e3:.0f} ms; {programs:.0f} programs from disk",
        ),
        Row(
            "Llama, first step with a warm executable cache: compilations",
            max(each["compilations"] for each in warm),
            "==",
            0,
        ),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        mode_layers_size = [int(each) if each.isdigit() else each for each in sys.argv[2:]]
        print(json.dumps({"device": device_step, "jax": jax_step}[sys.argv[1]](*mode_layers_size)))
    else:
        sys.exit(not print_table(rows()))
