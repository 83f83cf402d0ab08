"""Every day: some programs of the fuzzer, which the device runs as the CPU does; and the fuzzer itself.

More: python -m tests.operators.fuzz --programs 20000
"""

import os
import re
import subprocess
import sys

import torch

from tests.operators.fuzz.__main__ import program_of
from tests.operators.fuzz.calls import CALLS
from tests.operators.fuzz.check import check
from tests.operators.fuzz.minimise import minimised
from tests.operators.fuzz.program import Line, Program


def test_programs_are_the_same_on_the_device() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.operators.fuzz", "--programs", "80"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_a_program_is_made_of_its_seed_and_number() -> None:
    assert [program_of(3, number).script() for number in range(8)] == [
        program_of(3, number).script() for number in range(8)
    ]
    assert program_of(3, 0).script() != program_of(4, 0).script()


def test_the_script_of_a_failure_runs_on_both_devices(capsys) -> None:
    program = Program(_lines("t0 = torch.ones(2, device=device)"), mode="strict")
    with torch.tpu.eager_mode(torch.tpu.get_eager_mode()):  # the script sets another
        exec(program.script(), {})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["cpu", "tpu"]


def test_what_jumps_takes_no_rounded_tensor() -> None:
    # logaddexp2(-1, -1) is 0, or a last digit beside it: is it true?
    of_truth = [call for call in CALLS if re.search(r"logical_|\.sgn", call.template)]
    assert len(of_truth) > 8
    assert all(call.jumps for call in of_truth)


def _lines(*texts: str) -> list[Line]:
    return [Line(text, text.split()[0]) for text in texts]


def test_a_failure_is_cut_down_to_what_it_needs() -> None:
    # The CPU is told apart by its name, as a fault would tell it.
    program = Program(
        _lines(
            "t0 = torch.ones(3, device=device)",
            "t1 = t0 + 1",
            'i0 = device == "tpu"',
            "t2 = t1 * 2 + i0",
            "t3 = t0.sum()",
        )
    )
    failure = check(program)
    assert failure is not None
    assert failure.kind == "values"
    shorter, _ = minimised(program, failure)
    assert [line.text for line in shorter.lines] == [
        "t0 = torch.ones(3, device=device)",
        "t1 = t0 + 1",
        'i0 = device == "tpu"',
        "t2 = t1 * 2 + i0",
    ]
    assert "t3" not in shorter.script()


def test_errors_are_compared() -> None:
    assert check(Program(_lines("t0 = torch.ones(2, device=device)", "t1 = t0.view(3)"))) is None
    ours_only = check(
        Program(_lines("t0 = torch.ones(2, device=device)", 't1 = t0.view(2 + (device == "tpu"))'))
    )
    assert ours_only is not None
    assert ours_only.kind == "raises"
    theirs_only = check(
        Program(_lines("t0 = torch.ones(2, device=device)", 't1 = t0.view(2 + (device == "cpu"))'))
    )
    assert theirs_only is not None
    assert theirs_only.kind == "does not raise"


def test_last_digits_are_no_failure() -> None:
    lines = [
        Line("t0 = torch.tensor([1e-3, 40.0], device=device)", "t0"),
        Line("t1 = t0.exp() - 1", "t1", rounds=True),
        Line("t2 = t1.log() * 1e4", "t2", rounds=True),
    ]
    assert check(Program(lines)) is None
