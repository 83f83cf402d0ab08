"""Compiles calls of every lowering for real TPU chips and prints what the compiler does not take.

    python -m tests.tpu.compile_all [--topology v5e,v6e] [--only NAME] [--part i/n] [--rows FILE]

It needs the package libtpu and no chip.  Exit code 1 where a call fails that its lowering does not declare
(``on_tpu=`` in the table).  What is declared is compiled too: the table shows what a newer one has learnt.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from tests.tpu.call import LOWERINGS, Call
from tests.tpu.chips import TOPOLOGIES, compiler_is_installed
from tests.tpu.collect import DTYPES, collect
from tests.tpu.compiler import BATCH, Compiler
from tests.tpu.device_calls import device_calls


@dataclass(frozen=True)
class Row:
    """One line of the table: a call and what the compiler of each chip says about it (None: it compiles)."""

    lowering: str
    dtype: str
    call: str
    declared: bool
    problems: dict[str, str | None]

    def is_surprise(self) -> bool:
        """Whether the compiler does not take what the table of lowerings does not declare.

        That a declared call compiles is none: a declaration holds for all chips and for the worst shape.
        """
        return not self.declared and any(self.problems.values())


def compile_calls(calls: Sequence[Call], chips: Sequence[str]) -> Iterator[Row]:
    """Compile every call for every chip, in batches; what is declared not to compile goes one by one."""
    problems: list[dict[str, str | None]] = [{} for _ in calls]
    declared = [position for position, call in enumerate(calls) if call.is_declined()]
    others = [position for position, call in enumerate(calls) if not call.is_declined()]
    batches = [others[start : start + BATCH] for start in range(0, len(others), BATCH)]
    with Compiler(calls) as compiler:
        for chip in chips:
            for batch in [*batches, *([position] for position in declared)]:
                for position, problem in compiler.problems(batch, chip):
                    problems[position][chip] = problem
    for call, found in zip(calls, problems, strict=True):
        yield Row(call.lowering, call.dtype, call.described(), call.is_declined(), found)


def _calls(options: argparse.Namespace) -> list[Call]:
    kept = Path(options.calls) if options.calls else None
    if kept is not None and kept.exists():
        calls: list[Call] = pickle.loads(kept.read_bytes())
    else:
        dtypes = tuple(getattr(torch, name) for name in options.dtypes.split(","))
        calls = collect(options.each, options.samples, lambda name: options.operators in name, dtypes)
        if not options.operators:
            calls += device_calls({call.lowering for call in calls})
        if kept is not None:
            kept.write_bytes(pickle.dumps(calls))
    start, step = (int(number) for number in options.part.split("/"))
    return sorted(
        (call for call in calls if options.only in call.lowering),
        key=lambda call: (call.dtype, call.lowering),
    )[start::step]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topology", default=",".join(TOPOLOGIES), help="chips, separated by commas")
    parser.add_argument("--only", default="", help="lowerings whose name contains this")
    parser.add_argument("--operators", default="", help="database entries whose name contains this")
    parser.add_argument("--dtypes", default=",".join(str(dtype).removeprefix("torch.") for dtype in DTYPES))
    parser.add_argument("--each", type=int, default=1, help="calls of a lowering and dtype")
    parser.add_argument("--samples", type=int, default=2, help="samples of a database entry")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th call, from the i-th")
    parser.add_argument("--rows", help="append the table to this file, one JSON object a line")
    parser.add_argument("--calls", help="keep the collected calls in this file, or read them from it")
    options = parser.parse_args()
    if not compiler_is_installed():
        parser.error("the TPU compiler is not installed: pip install libtpu (Linux, x86-64)")
    chips = options.topology.split(",")
    calls = _calls(options)
    rows = list(compile_calls(calls, chips))
    for row in rows:
        for chip, problem in row.problems.items():
            if problem is not None:
                note = "declared" if row.declared else "FAIL"
                print(f"{note} {chip} {row.call}: {problem[:200]}")
    for chip in chips:
        failed = [row for row in rows if row.problems[chip] is not None]
        served = {row.lowering for row in rows if row.problems[chip] is None}
        print(
            f"{chip}: {len(rows) - len(failed)} of {len(rows)} calls compile, "
            f"of {len(served)} of {len(LOWERINGS)} lowerings"
        )
    missing = sorted(LOWERINGS - {row.lowering for row in rows})
    if not options.only and options.part == "0/1":
        print(f"{len(missing)} lowerings without a call: {' '.join(missing)}")
    if options.rows:
        with Path(options.rows).open("a") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)
    return int(any(row.is_surprise() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
