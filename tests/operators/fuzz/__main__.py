"""Run programs and print what differs, shortest form first: a Python script that shows it."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.operators.fuzz.check import Failure, check
from tests.operators.fuzz.known import reason_for
from tests.operators.fuzz.minimise import minimised
from tests.operators.fuzz.program import Program, generate

_STRICT_EVERY = 8


@dataclass
class Found:
    number: int
    program: Program
    failure: Failure
    reason: str | None  # why it is known; None: a fault


def program_of(seed: int, number: int) -> Program:
    """The same for the same numbers, whatever ran before."""
    return generate(random.Random(f"{seed} {number}"), "strict" if number % _STRICT_EVERY == 7 else "fused")


def fuzz(seed: int, numbers: Sequence[int]) -> Iterator[Found]:
    for number in numbers:
        program = program_of(seed, number)
        failure = check(program)
        if failure is not None:
            program, failure = minimised(program, failure)
            yield Found(number, program, failure, reason_for(program, failure))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start = time.monotonic()
    numbers = range(options.first, options.first + options.programs)
    faults, known = 0, 0
    for found in fuzz(options.seed, numbers):
        if found.reason is not None:
            known += 1
            continue
        faults += 1
        print(f"---- program {found.number}, {found.failure.kind}: {found.failure.text}", flush=True)
        print(found.program.script(), flush=True)
    print(f"{len(numbers)} programs, {faults} differ, {known} as known; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
