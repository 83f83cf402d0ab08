"""Proof that a run survives: faults at random moments of small real runs, and what each of them cost.

    python -m tests.acceptance.fault_campaign [--faults 50] [--seed N] [--only NAME] [--work DIR]

Runs of a small Llama on the tpu device are killed, stopped, damaged and starved; after each fault the same
command is given again, until the run is done. In the end each run's losses, every step and every evaluation,
must be to the last bit those of a run that nobody disturbed. Takes 10 to 15 minutes on 2 cores; needs root
(or `unshare -rm` before it) to have a disk that it may fill up. Exits with 1 where a bar does not hold.

Processes find their programs compiled by those before them (JAX's own cache), which saves minutes, but for
those that are to be stopped while they compile.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from tests.acceptance.faults import (
    INTERVAL,
    FaultError,
    Inflict,
    MissedError,
    Scene,
    Struck,
    corrupted,
    is_full_for_a_while,
    killed,
    not_a_number,
    read_only,
    stays_full,
    stuck,
    terminated,
    worker_killed,
)
from tests.acceptance.main_job import differing_losses
from tests.acceptance.recipe_process import RecipeRun
from tests.acceptance.small_disk import SmallDisk
from tests.benchmarks.bars import Row, print_table

STEPS = 200
LAST_FAULT_AFTER = 120  # a run that has come so far is finished without further faults
RECIPE = f"""
device: tpu
model:
  {{name: llama-5m, vocab_size: 512, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 1,
   num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}}
data: {{files: ../text.txt, vocab_size: 512, sequence_length: 64, cache_dir: cache}}
batch: {{tokens: 512, sequences: 8}}
trainer: {{steps: {STEPS}, evaluate_every: 25, evaluate_batches: 5}}
checkpoint: {{every: {INTERVAL}, keep_last: 3}}
log: {{every: 3, progress: plain}}
sample: {{max_new_tokens: 0}}
watchdog: {{step_seconds: 10, heartbeat_seconds: 1}}
"""

FAULTS: dict[str, Inflict] = {
    "SIGKILL: start-up": killed("start-up"),
    "SIGTERM: start-up": terminated("start-up"),
    "SIGKILL: step": killed("step"),
    "SIGTERM: step": terminated("step"),
    "SIGKILL: save": killed("save"),
    "SIGTERM: save": terminated("save"),
    "SIGKILL: evaluation": killed("evaluation"),
    "SIGTERM: evaluation": terminated("evaluation"),
    "SIGTERM: first step": terminated("first step"),
    "disk full: for a while": is_full_for_a_while,
    "disk full: to the end": stays_full,
    "read-only directory": read_only,
    "checkpoint: flip a bit": corrupted("flip"),
    "checkpoint: truncate a file": corrupted("truncate"),
    "checkpoint: delete a file": corrupted("delete"),
    "data worker killed": worker_killed,
    "stuck step": stuck,
    "NaN batch: stop": not_a_number("stop"),
    "NaN batch: skip": not_a_number("skip"),
    "NaN batch: rollback": not_a_number("rollback"),
}
"""Each comes up equally often."""
OVERRIDES = {
    "data worker killed": ("data.workers=1",),
    "NaN batch: skip": ("trainer.on_nonfinite=skip", f"trainer.steps={STEPS // 2}"),
    "NaN batch: rollback": ("trainer.on_nonfinite=rollback", f"trainer.steps={STEPS // 2}"),
}
"""What a run must have for the fault; the others can follow each other in one run."""
CHANGING = ("NaN batch: skip", "NaN batch: rollback")
"""Faults that are meant to change what is learnt after them."""


@dataclass
class Entry:
    """A fault, the run it was done to, and what became of both."""

    fault: str
    run: RecipeRun
    struck: Struck | None
    complaint: str = ""
    lost: int | None = None
    then: str = ""
    """What the next process said when it went on."""

    @property
    def holds(self) -> bool:
        return not self.complaint


def main() -> int:
    options = parse_arguments("fault_campaign", __doc__, FAULTS, number=50)
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    work = options.work or Path(tempfile.mkdtemp(prefix="faults-"))
    print(f"working in {work}, faults chosen with --seed {seed}", flush=True)
    (work / "text.txt").write_text(some_text())
    (work / "small.yaml").write_text(RECIPE)
    began = time.perf_counter()
    with SmallDisk(work / "disk", 64 << 20) as disk:
        campaign = Campaign(work, disk, random.Random(seed))
        chosen = [name for name in FAULTS if options.only in name]
        campaign.go_through(list(islice(cycle(chosen), options.faults)))
    print(f"\n{options.faults} faults in {time.perf_counter() - began:.0f} s\n")
    print_entries(campaign.entries)
    return 0 if print_table(bars(campaign.entries)) else 1


def parse_arguments(
    module: str, description: str | None, faults: Iterable[str], number: int
) -> argparse.Namespace:
    """Of a campaign with these faults, of which it has `number` unless told otherwise."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.acceptance.{module}", description=(description or "").split("\n")[0]
    )
    parser.add_argument("--faults", type=int, default=number, help=f"how many (default: {number})")
    parser.add_argument("--seed", type=int, help="of the order and the moments (default: another each time)")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument(
        "--work", type=Path, help="an empty directory for the runs (default: a temporary one)"
    )
    options = parser.parse_args()
    if not any(options.only in name for name in faults):
        parser.error(f"--only {options.only!r}: expected a part of one of {', '.join(faults)}")
    if options.work is not None:
        options.work = options.work.resolve()
    return options


def some_text() -> str:
    """The product's own source: 100 kB or so that every checkout has."""
    sources = Path(__file__).resolve().parents[2] / "tputrain"
    return "".join(path.read_text(encoding="utf-8") for path in sorted(sources.glob("*.py")))


class Campaign:
    """Runs, one after the other, that faults are done to."""

    def __init__(self, work: Path, disk: SmallDisk, choice: random.Random):
        self.work, self.disk, self.choice = work, disk, choice
        self.compiled_before = {
            "JAX_COMPILATION_CACHE_DIR": str(work / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        self.num_runs = 0
        self.entries: list[Entry] = []
        self.undisturbed = self.new_run("undisturbed", ())
        self.undisturbed.start(environment=self.compiled_before).wait_for(lambda: False)
        print(f"undisturbed: {self.undisturbed.steps()[-1]['step']} steps", flush=True)

    def new_run(self, name: str, overrides: tuple[str, ...]) -> RecipeRun:
        """A run whose directory is on the disk that can be filled, and its output elsewhere."""
        directory = self.work / name
        (self.disk.path / name).mkdir()
        directory.mkdir()
        (directory / "runs").symlink_to(self.disk.path / name)
        return RecipeRun(directory, self.work / "small.yaml", overrides)

    def go_through(self, names: list[str]) -> None:
        """Do these faults, in some order, to as few runs as have room for them."""
        self.choice.shuffle(names)
        for kind in sorted({OVERRIDES.get(name, ()) for name in names}):
            waiting = [name for name in names if OVERRIDES.get(name, ()) == kind]
            while waiting:
                self.num_runs += 1
                run = self.new_run(f"run-{self.num_runs}", kind)
                waiting = self.disturb(run, waiting)

    def disturb(self, run: RecipeRun, names: list[str]) -> list[str]:
        """Do as many of these faults as the run has room for, and finish it; returns those left over."""
        scene = Scene(run, self.choice, self.disk, self.compiled_before)
        entries: list[Entry] = []
        left = list(names)
        is_lost = False
        while left and not is_lost and scene.run.newest_step() < LAST_FAULT_AFTER:
            name = left.pop(0)
            entry = Entry(name, run, None)
            entries.append(entry)
            try:
                entry.struck = FAULTS[name](scene)
            except (FaultError, MissedError) as error:
                entry.complaint = f"{type(error).__name__}: {error}"
                is_lost = True
            self.say(entry)
            if name in CHANGING:
                break
        self.finish(scene)
        self.judge(run, entries)
        self.entries += entries
        return left

    def finish(self, scene: Scene) -> None:
        scene.start().wait_for(lambda: False, may_fail=True)

    def say(self, entry: Entry) -> None:
        struck, what = entry.struck, entry.complaint
        if struck is not None:
            what = f"{struck.moment}, exit {struck.code}: {struck.said[:90]}"
        print(f"{entry.run.directory.name}: {entry.fault}: {what}", flush=True)

    def judge(self, run: RecipeRun, entries: list[Entry]) -> None:
        """What each fault cost, by where the process after it went on, and what is wrong with the run."""
        wrong = self.wrong_in(run, entries)
        began_at = list(begun_steps(run))
        for entry in entries:
            struck = entry.struck
            if struck is None:
                continue
            problems = list(struck.problems)
            if struck.code != struck.expected_code:
                problems.append(f"exit code {struck.code}, expected {struck.expected_code}")
            next_began = next((step for step in began_at[struck.process :] if step is not None), None)
            entry.then = what_came_then(run, struck.process)
            if next_began is not None:
                entry.lost = max(0, struck.reached - next_began)
                if entry.lost > struck.may_lose:
                    problems.append(f"lost {entry.lost} steps, at most {struck.may_lose}")
            elif struck.expected_code != 0:
                problems.append("no process went on after it")
            entry.complaint = "; ".join([*problems, *([wrong] if wrong else [])])

    def wrong_in(self, run: RecipeRun, entries: list[Entry]) -> str:
        """Where the finished run differs from the undisturbed one; "" where it does not."""
        changed = any(entry.fault in CHANGING for entry in entries)
        last = STEPS // 2 if changed else STEPS
        if [record["step"] for record in run.steps()] != list(range(1, last + 1)):
            return f"not every step up to {last} is logged once, in order"
        if changed:
            # The update that was left out changes what follows: it must be finite, and learning.
            evaluations = run.evaluations()
            return "" if evaluations[-1]["loss"] < evaluations[0]["loss"] else "nothing was learnt"
        for name in ("steps", "evaluations"):
            if different := differing_losses(getattr(self.undisturbed, name)(), getattr(run, name)()):
                return f"{len(different)} losses of {name} differ, first {different[0]}"
        return ""


def begun_steps(run: RecipeRun) -> Iterator[int | None]:
    """The step that each process of a run went on from; None for one that did not come so far."""
    for number in range(1, run.num_processes + 1):
        output = (run.directory / f"output-{number}.txt").read_text(errors="replace")
        _, resumed, rest = output.partition("\nresumed from ")
        if resumed:
            yield int(rest.partition(" at step ")[2].split()[0])
        elif "evaluating at step 0" in output:
            yield 0
        elif " is finished: it has done" in output:
            yield STEPS
        else:
            yield None


def what_came_then(run: RecipeRun, process: int) -> str:
    """What the processes after this one said of where they go on, as far as the first that trained."""
    said: list[str] = []
    for number in range(process + 1, run.num_processes + 1):
        for line in (run.directory / f"output-{number}.txt").read_text(errors="replace").splitlines():
            if " refused: " in line or line.startswith("tputrain: "):
                said.append(line)
            elif line.startswith(("resumed from", "evaluating at step 0")):
                return "; ".join([*said, line])
    return "; ".join(said) or "nothing"


def print_entries(entries: list[Entry]) -> None:
    for number, entry in enumerate(entries, 1):
        struck = entry.struck
        lost = "-" if entry.lost is None else str(entry.lost)
        verdict = "recovered" if entry.holds else f"FAILED: {entry.complaint}"
        if struck is None:
            print(f"{number:2}  {entry.fault:27}  {verdict}")
            continue
        exit_code = f"exit {struck.code:>4}"
        print(f"{number:2}  {entry.fault:27}  {struck.moment:44}  {exit_code}  lost {lost:>2}  {verdict}")
        print(f"      {struck.said[:150]}")
        print(f"      then: {entry.then[:150]}")
    print()


def bars(entries: list[Entry]) -> list[Row]:
    failed = [entry for entry in entries if not entry.holds]
    lost_to = {
        signal: [entry.lost or 0 for entry in entries if entry.fault.startswith(signal)]
        for signal in ("SIGKILL", "SIGTERM")
    }
    accepted = [entry for entry in entries if "accepted" in entry.complaint]
    too_many = [entry for entry in entries if entry.struck and (entry.lost or 0) > entry.struck.may_lose]
    return [
        Row(
            "faults not recovered from",
            len(failed),
            "==",
            0,
            "; ".join(f"{entry.fault}: {entry.complaint}" for entry in failed[:3]) or f"of {len(entries)}",
        ),
        Row("damaged checkpoints accepted", len(accepted), "==", 0),
        Row("steps lost to SIGTERM", max(lost_to["SIGTERM"], default=0), "==", 0),
        Row(
            "faults that cost more steps than they may",
            len(too_many),
            "==",
            0,
            f"an interval is {INTERVAL}; most lost to SIGKILL {max(lost_to['SIGKILL'], default=0)}",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
