"""Run programs and print what differs, shortest form first: a Python script that shows it."""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.operators.fuzz.check import Failure, check, check_together
from tests.operators.fuzz.known import reason_for
from tests.operators.fuzz.minimise import minimised
from tests.operators.fuzz.program import Program, generate
from tests.operators.sweep import XLA_FLAGS

_STRICT_EVERY = 8
_TOGETHER = 12  # programs that are one for XLA: compiling is what takes time


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
    for start in range(0, len(numbers), _STRICT_EVERY * _TOGETHER):
        programs = {
            number: program_of(seed, number) for number in numbers[start : start + _STRICT_EVERY * _TOGETHER]
        }
        for mode in ("fused", "strict"):
            chosen = [number for number, program in programs.items() if program.mode == mode]
            for first in range(0, len(chosen), _TOGETHER):
                yield from _fuzzed({number: programs[number] for number in chosen[first : first + _TOGETHER]})


def _fuzzed(programs: dict[int, Program]) -> Iterator[Found]:
    failures = check_together(list(programs.values()))
    for (number, program), failure in zip(programs.items(), failures, strict=True):
        if failure is None:
            continue
        alone = check(program)
        if alone is None and failure.kind in ("raises", "does not raise", "another error"):
            continue  # an index out of range is told at the next read, which may be another program's
        if alone is None:
            failure = Failure(failure.kind, f"only in one program with {list(programs)}: {failure.text}")
        else:
            program, failure = minimised(program, alone)
            if not program.lines:
                continue  # an earlier program's, told late: a tensor that is larger than memory
        yield Found(number, program, failure, reason_for(program, failure))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_FLAGS", XLA_FLAGS)
    torch.set_num_threads(1)
    start = time.monotonic()
    numbers = range(options.first, options.first + options.programs)
    faults, known = 0, 0
    for found in fuzz(options.seed, numbers):
        known += found.reason is not None
        faults += found.reason is None
        if found.reason is not None:
            continue
        print(f"---- program {found.number}, {found.failure.kind}: {found.failure.text}", flush=True)
        print(found.program.script(), flush=True)
    print(f"{len(numbers)} programs, {faults} differ, {known} as known; {time.monotonic() - start:.0f} s")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
