"""The first training step of a process, of the 5M Llama: from recording it to its end.

* cold, with nothing on disk: at most the time that hand-written JAX takes for its own, which is traced,
  lowered and compiled too;
* with a warm executable cache: at most 1.5 s, and nothing is compiled.

Each figure is of a fresh process, after its imports and with model and optimizer's state on the device; they
take turns. JAX's own compilation cache is off in all of them.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.interleaved import Timing

ROOT = Path(__file__).resolve().parents[2]


def device_step() -> dict[str, float]:
    """Seconds of the first step on the tpu device, and where its program came from."""
    import torch

    from tests.benchmarks import torch_step
    from tputrain.optim.optimizer import create_state

    step = torch_step.TrainingStep(torch_step.llama(), torch_step.llama_loss, torch_step.llama_batch(), "tpu")
    create_state(step.optimizer)
    torch.tpu.synchronize()
    before = dict(torch.tpu.compile_stats())
    began = time.perf_counter()
    step()
    torch.tpu.synchronize()
    took = time.perf_counter() - began
    after = torch.tpu.compile_stats()
    counted = {name: after[name] - before[name] for name in ("compilations", "disk_hits", "compile_seconds")}
    began = time.perf_counter()
    step()
    torch.tpu.synchronize()
    return {"seconds": took, "second step": time.perf_counter() - began} | counted


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


def in_a_fresh_process(which: str, cache: Path) -> dict[str, float]:
    """What `device_step` or `jax_step` found."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.first_step", which],
        cwd=ROOT,
        env=environment | {"TPU_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def rows(rounds: int = 5) -> list[Row]:
    found: dict[str, list[dict[str, float]]] = {"cold": [], "jax": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as directory:
            found["cold"].append(in_a_fresh_process("device", Path(directory)))
            found["jax"].append(in_a_fresh_process("jax", Path(directory)))
            found["warm"].append(in_a_fresh_process("device", Path(directory)))
    cold, jax, warm = (Timing(tuple(each["seconds"] for each in found[name])) for name in found)
    second = min(each["second step"] for each in found["warm"])
    programs = sum(each["disk_hits"] for each in found["warm"])
    return [
        Row("Llama, first step, cold / JAX", cold.minimum / jax.minimum, "<=", 1.0, f"{cold} / {jax}"),
        Row(
            "Llama, first step with a warm executable cache, s",
            warm.minimum,
            "<=",
            1.5,
            f"{warm}; the second takes {second * 1e3:.0f} ms; {programs:.0f} programs from disk",
        ),
        Row(
            "Llama, first step with a warm executable cache: compilations",
            max(each["compilations"] for each in found["warm"]),
            "==",
            0,
        ),
    ]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps({"device": device_step, "jax": jax_step}[sys.argv[1]]()))
    else:
        sys.exit(not print_table(rows()))
