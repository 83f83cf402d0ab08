"""Trains models of the list here, and compiles what they launch for a real TPU chip.

    python -m tests.tpu.compile_models [--chip v6e] [NAME ...]

Needs the package libtpu and no chip. Exit code 1 if the compiler refuses a program. Each model has a process
of its own, since the compiler may end it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import torch

from tests.models import architectures, classics
from tests.models.case import Case
from tests.tpu.chips import ENVIRONMENT, TOPOLOGIES, compiler_is_installed, target
from tests.tpu.training_steps import record_segments, segments
from tpu_backend.runtime import compiler, segment

CASES = {
    case.name: case for case in (*(each.case() for each in architectures.ARCHITECTURES), *classics.CASES)
}
STEPS = 2
TIME_LIMIT = 600  # seconds a model


def recorded(case: Case) -> list[dict[str, Any]]:
    """The programs of two training steps, each once: the first makes the optimizer's state."""
    record_segments()
    segment.target_platform = lambda: "tpu"  # what a TPU does not compile runs on the CPU
    torch.manual_seed(0)
    model = case.model().train().to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with torch.tpu.eager_mode("fused"):
        for step in range(STEPS):
            batch = case.batch(torch.Generator().manual_seed(step))
            model(**{name: value.to("tpu") for name, value in batch.items()}).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.tpu.synchronize()
    return list({(tuple(each["tape"]), tuple(each["outputs"])): each for each in segments}.values())


def problems(case: Case, chip: str) -> list[str]:
    """What the compiler says of programs that it does not take."""
    found = []
    for description in recorded(case):
        try:
            program, _ = compiler.lower_segment(description, target(chip))
            program.compile()
        except Exception as error:
            found.append(f"{len(description['circumstances'])} operations: {type(error).__name__}: {error}")
    return found


def in_a_process(name: str, chip: str) -> list[str]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.tpu.compile_models", "--alone", "--chip", chip, name],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"takes longer than {TIME_LIMIT} s"]
    if done.returncode:
        return [f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no word'])[-1]}"]
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="models of the list; all unless given")
    parser.add_argument("--chip", choices=sorted(TOPOLOGIES), default="v5e")
    parser.add_argument("--alone", action="store_true", help="one model in this process; prints JSON")
    options = parser.parse_args()
    if unknown := set(options.names) - CASES.keys():
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there is {', '.join(CASES)}")
    if not compiler_is_installed():
        parser.error("the TPU compiler is not installed: pip install libtpu (Linux, x86-64)")
    if options.alone:
        print(json.dumps(problems(CASES[options.names[0]], options.chip)))
        return 0
    num_failed = 0
    for name in options.names or CASES:
        found = in_a_process(name, options.chip)
        num_failed += bool(found)
        print("FAIL" if found else "pass", name, *found, flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
