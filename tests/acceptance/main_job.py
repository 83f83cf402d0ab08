"""The main job, whole: the recipe trains, survives SIGKILL at the worst moments, and learns.

    python -m tests.acceptance.main_job [--steps N] [--seed N] [--work DIR] [key=value ...]

Three runs by the command line: one that nobody disturbs; one that is killed at three random steps, during a
save and during an evaluation, and started again each time with the same command; one on `device=cpu`,
PyTorch's own kernels.  Then one table: the killed run's losses equal the undisturbed one's to the last bit,
and it learnt what it should.  Exits with 1 where a bar does not hold.  The bars on what was learnt are for
the recipe at its full length: with `--steps` they are left out.
"""

import argparse
import math
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.recipe_process import RecipeProcess, RecipeRun, Record
from tests.benchmarks.bars import Row, print_table

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "llama.yaml"
NUM_STEP_KILLS = 3
BLOCK = 10  # steps between two looks at the metrics, as log.every has it
MAX_TRIES = 5  # a save lasts milliseconds: it may be over before the signal arrives


@dataclass(frozen=True)
class Kill:
    """When to kill: at `moment`, the first that comes once `after_step` was reached."""

    moment: str  # "step", "save" or "evaluation"
    after_step: int


def main() -> int:
    options = parse_arguments()
    work = options.work or Path(tempfile.mkdtemp(prefix="main_job-"))
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    print(f"working in {work}, kills chosen with --seed {seed}", flush=True)
    overrides = [*options.overrides, *([f"trainer.steps={options.steps}"] if options.steps else [])]

    undisturbed = RecipeRun(work / "undisturbed", options.recipe, overrides)
    announced_finish("undisturbed", undisturbed)
    killed = RecipeRun(work / "killed", options.recipe, overrides)
    rows = kill_and_resume(killed, plan_kills(random.Random(seed), undisturbed))
    rows += equality_rows(undisturbed, killed)
    if not options.steps:
        on_cpu = RecipeRun(work / "cpu", options.recipe, [*overrides, "device=cpu"])
        announced_finish("device=cpu", on_cpu)
        rows += learning_rows(undisturbed, on_cpu)
    print()
    holds = print_table(rows)
    if options.steps:
        print("shortened by --steps: what was learnt is not judged")
    return 0 if holds else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance.main_job", description=__doc__.split("\n")[0]
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="settings for all runs")
    parser.add_argument("--recipe", type=resolved, default=RECIPE, help="default: recipes/llama.yaml")
    parser.add_argument("--steps", type=int, help="shorten the runs; what was learnt is then not judged")
    parser.add_argument("--seed", type=int, help="of the choice of kills (default: another one each time)")
    parser.add_argument(
        "--work", type=resolved, help="an empty directory for the runs (default: a temporary one)"
    )
    return parser.parse_args()


def resolved(path: str) -> Path:
    # The runs have working directories of their own.
    return Path(path).resolve()


def announced_finish(name: str, run: RecipeRun) -> None:
    print(f"{name}: ...", end=" ", flush=True)
    start = time.perf_counter()
    run.finish()
    print(f"{run.steps()[-1]['step']} steps in {time.perf_counter() - start:.0f} s", flush=True)


def plan_kills(choice: random.Random, undisturbed: RecipeRun) -> list[Kill]:
    """Three random steps, and a random save and evaluation, in the order in which they come."""
    last = undisturbed.steps()[-1]["step"]
    # Not the evaluations before the first step and after the last: between those there must be one to hit.
    evaluated = [record["step"] for record in undisturbed.evaluations() if 0 < record["step"] < last]
    if not evaluated:
        raise SystemExit(
            f"no evaluation between step 1 and {last}: nothing to kill; lower trainer.evaluate_every"
        )
    kills = [Kill("step", choice.randrange(1, last)) for _ in range(NUM_STEP_KILLS)]
    kills.append(Kill("save", choice.randrange(0, max(evaluated))))
    kills.append(Kill("evaluation", choice.choice(evaluated) - 1))
    return sorted(kills, key=lambda kill: kill.after_step)


def kill_and_resume(run: RecipeRun, kills: list[Kill]) -> list[Row]:
    """Run to the end with every kill on the way; one row for each."""
    rows = []
    for kill in kills:
        where = kill_once(run, kill)
        print(f"killed: {kill.moment}, {where or 'MISSED'}", flush=True)
        rows.append(Row(f"SIGKILL: {kill.moment} after step {kill.after_step}", bool(where), "==", 1, where))
    last = run.finish()
    rows.append(
        Row(
            "the last process went on from a checkpoint",
            last.resumed_at() is not None,
            "==",
            1,
            f"from step {last.resumed_at()}, process {run.num_processes}",
        )
    )
    return rows


def kill_once(run: RecipeRun, kill: Kill) -> str:
    """Start the run and kill it at the moment asked for; says where that was, "" where it was not hit."""
    for _ in range(MAX_TRIES):
        process = run.start()
        if not (wait_for_step(process, kill.after_step) and wait_for_moment(process, kill.moment)):
            return ""
        process.kill()
        # Asked again: a moment may have passed before the signal came.
        if is_at(process, kill.moment):
            return f"began at step {process.resumed_at() or 0}, logged up to step {run.steps()[-1]['step']}"
    return ""


def wait_for_step(process: RecipeProcess, step: int) -> bool:
    """Wait until about `step`; False where the process ends before.

    Metrics are written in blocks: from the last block before the step on, time tells.
    """
    if not process.wait_for(lambda: process.has_reached(step - BLOCK)):
        return False
    last = process.run.steps()[-1]
    until = time.time() + max(0, step - last["step"]) * last["step_seconds"]
    return process.wait_for(lambda: time.time() >= until, poll_seconds=0.01)


def wait_for_moment(process: RecipeProcess, moment: str) -> bool:
    """Wait until the process is at such a moment; False where it ends before."""
    return process.wait_for(lambda: is_at(process, moment), poll_seconds=0.001)


def is_at(process: RecipeProcess, moment: str) -> bool:
    """Whether the process is at such a moment now; at a step it always is."""
    return {"step": lambda: True, "save": process.saves, "evaluation": process.evaluates}[moment]()


def equality_rows(undisturbed: RecipeRun, killed: RecipeRun) -> list[Row]:
    """The killed run's losses are the undisturbed one's, every step and every evaluation once."""
    rows = []
    for name, expected, met in (
        ("step", undisturbed.steps(), killed.steps()),
        ("evaluation", undisturbed.evaluations(), killed.evaluations()),
    ):
        different = differing_losses(expected, met)
        rows.append(
            Row(
                f"{name}s whose loss differs, as float hex",
                len(different),
                "==",
                0,
                different[0] if different else f"{len(expected)} equal, last {expected[-1]['loss_hex']}",
            )
        )
        once = [record["step"] for record in met] == [record["step"] for record in expected]
        rows.append(Row(f"each {name} is logged once, in order", once, "==", 1))
    return rows


def differing_losses(expected: list[Record], met: list[Record]) -> list[str]:
    """A line for each step whose loss is not the same to the last bit, or is on one side only."""
    left = {record["step"]: record["loss_hex"] for record in expected}
    right = {record["step"]: record["loss_hex"] for record in met}
    return [
        f"step {step}: {left.get(step)} and {right.get(step)}"
        for step in sorted(left.keys() | right.keys())
        if left.get(step) != right.get(step)
    ]


def learning_rows(undisturbed: RecipeRun, on_cpu: RecipeRun) -> list[Row]:
    """The bars on what the recipe learns at its full length."""
    evaluations = undisturbed.evaluations()
    first, last = evaluations[0], evaluations[-1]
    uniform = math.log(undisturbed.vocabulary_size())
    native = on_cpu.evaluations()[-1]
    return [
        Row(
            "first validation loss from ln(vocabulary), nats",
            abs(first["loss"] - uniform),
            "<=",
            0.3,
            f"{first['loss']:.4f} at step {first['step']}, ln {uniform:.4f}",
        ),
        Row(
            "final validation, bits per byte",
            last["bits_per_byte"],
            "<=",
            1.95,
            f"at step {last['step']}; device=cpu {native['bits_per_byte']:.4f}",
        ),
        Row(
            "final validation loss from device=cpu, nats",
            abs(last["loss"] - native["loss"]),
            "<=",
            0.02,
            f"{last['loss']:.4f} and {native['loss']:.4f}",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
