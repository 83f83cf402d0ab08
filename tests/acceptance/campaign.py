"""A campaign: faults at random moments of small real runs, and what each of them cost.

After each fault the run goes on, by the same command or by its launcher. In the end its losses must be to the
last bit those of a run that nobody disturbed, every step and every evaluation. `fault_campaign` has runs of
one process, `rank_campaign` runs of four ranks.
"""

import argparse
import random
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from tests.acceptance.main_job import differing_losses, resolved
from tests.acceptance.recipe_process import RecipeProcess, RecipeRun
from tests.acceptance.small_disk import SmallDisk
from tests.benchmarks.bars import Row, print_table

INTERVAL = 20  # steps between checkpoints
FURTHEST = 30  # steps that a run makes at most before its fault comes


class FaultError(Exception):
    """At a fault or after it the run did not do what it must; one line says what."""


@dataclass(kw_only=True)
class Struck:
    """What a fault did, and what became of the run."""

    moment: str
    """When, and how it ended what it was done to."""
    reached: int
    """The last step that was logged before; where there was none, the one that the process went on from."""
    resumed: int | None = None
    """The step from which the run went on; None: it did not yet."""
    may_lose: int = INTERVAL
    """Steps."""
    said: str
    problems: list[str] = field(default_factory=list)

    @property
    def lost(self) -> int:
        """Steps that were done again, as far as that is known."""
        return 0 if self.resumed is None else max(0, self.reached - self.resumed)


@dataclass
class Entry:
    """A fault, the run that it was done to, and what became of both."""

    fault: str
    run: RecipeRun
    struck: Struck | None = None
    complaint: str = ""

    @property
    def holds(self) -> bool:
        return not self.complaint


class Campaign(ABC):
    """Runs, one after the other, that faults are done to."""

    name: str
    """Of its module."""
    recipe: str
    steps: int
    """Of a run."""
    last_fault_after: int
    """A run that has come to this step is finished without further faults."""
    faults: Mapping[str, Callable[[Any], Struck]]
    """By name; they raise FaultError."""
    scene: Callable[..., Any]
    """What they are given: of a run, the random choice, the disk and the environment."""
    environment: dict[str, str]
    """With which a process finds the programs of those before it."""

    def __init__(self, work: Path, disk: SmallDisk, choice: random.Random):
        self.work, self.disk, self.choice = work, disk, choice
        self.num_runs = 0
        self.entries: list[Entry] = []
        self.undisturbed = self.new_run("undisturbed")
        began = time.perf_counter()
        self.undisturbed.start(environment=self.environment).wait_for(lambda: False)
        seconds = time.perf_counter() - began
        print(f"undisturbed: {self.undisturbed.last_step()} steps in {seconds:.0f} s", flush=True)

    @classmethod
    def in_turn(cls) -> list[str]:
        """The names of faults, as often as they come in turn."""
        return list(cls.faults)

    @abstractmethod
    def finish(self, scene: Any, entries: list[Entry]) -> None:
        """Let the run come to its end, and `judge` it."""

    def new_run(self, name: str, overrides: tuple[str, ...] = ()) -> RecipeRun:
        """A run whose directory is on the disk that can be filled, and its output elsewhere."""
        directory = self.work / name
        (self.disk.path / name).mkdir()
        directory.mkdir()
        (directory / "runs").symlink_to(self.disk.path / name)
        return RecipeRun(directory, self.work / "small.yaml", overrides)

    def go_through(self, names: list[str], overrides: tuple[str, ...] = ()) -> None:
        """Do these faults to as few runs as have room for them."""
        while names:
            self.num_runs += 1
            names = self.disturb(self.new_run(f"run-{self.num_runs}", overrides), names)

    def disturb(self, run: RecipeRun, names: list[str]) -> list[str]:
        """Do as many of these faults as the run has room for, and finish it; returns those left over."""
        scene = self.scene(run, self.choice, self.disk, self.environment)
        entries: list[Entry] = []
        left, is_lost = list(names), False
        while left and not is_lost and run.newest_step() < self.last_fault_after:
            entry = Entry(left.pop(0), run)
            entries.append(entry)
            try:
                entry.struck = self.faults[entry.fault](scene)
            except FaultError as error:
                entry.complaint = f"{type(error).__name__}: {error}"
                is_lost = True
            say(entry)
        self.finish(scene, entries)
        self.entries += entries
        return left

    def judge(self, run: RecipeRun, entries: list[Entry], wrong: str = "") -> None:
        """What is wrong with each fault, or (`wrong`: already known) with the finished run."""
        wrong = wrong or self.wrong_in(run)
        if wrong:
            print(f"{run.directory.name}: {wrong}", flush=True)
        for entry in entries:
            if (struck := entry.struck) is None:
                continue
            problems = list(struck.problems)
            if struck.lost > struck.may_lose:
                problems.append(f"lost {struck.lost} steps, at most {struck.may_lose}")
            entry.complaint = "; ".join(filter(None, [*problems, wrong]))

    def wrong_in(self, run: RecipeRun) -> str:
        """Where the finished run differs from the undisturbed one; "" where it does not."""
        if problem := not_logged_once(run, self.steps):
            return problem
        for name in ("steps", "evaluations"):
            if different := differing_losses(getattr(self.undisturbed, name)(), getattr(run, name)()):
                return f"{len(different)} losses of {name} differ, first {different[0]}"
        return ""

    def bars(self) -> list[Row]:
        failed = [entry for entry in self.entries if not entry.holds]
        struck = [entry.struck for entry in self.entries if entry.struck is not None]
        most = max((each.lost for each in struck), default=0)
        return [
            Row(
                "faults not recovered from",
                len(failed),
                "==",
                0,
                "; ".join(f"{entry.fault}: {entry.complaint}" for entry in failed[:3])
                or f"of {len(self.entries)}",
            ),
            Row(
                "faults that cost more steps than they may",
                sum(each.lost > each.may_lose for each in struck),
                "==",
                0,
                f"an interval is {INTERVAL}; most lost {most}",
            ),
        ]


def run_campaign(kind: type[Campaign], description: str, num_faults: int) -> int:
    """By the command line's arguments; returns an exit code. `num_faults`: unless these tell it otherwise."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.acceptance.{kind.name}", description=description.split("\n")[0]
    )
    parser.add_argument("--faults", type=int, default=num_faults, help=f"how many (default: {num_faults})")
    parser.add_argument("--seed", type=int, help="of the order and the moments (default: another each time)")
    parser.add_argument("--only", default="", help="only faults whose name contains this")
    parser.add_argument(
        "--work", type=resolved, help="an empty directory for the runs (default: a temporary one)"
    )
    options = parser.parse_args()
    if not any(options.only in name for name in kind.faults):
        parser.error(f"--only {options.only!r}: expected a part of one of {', '.join(kind.faults)}")
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    work = options.work or Path(tempfile.mkdtemp(prefix=f"{kind.name}-"))
    print(f"working in {work}, faults chosen with --seed {seed}", flush=True)
    (work / "text.txt").write_text(some_text())
    (work / "small.yaml").write_text(kind.recipe)
    choice = random.Random(seed)
    in_turn = [name for name in kind.in_turn() if options.only in name]
    choice.shuffle(in_turn)
    names = list(islice(cycle(in_turn), options.faults))
    choice.shuffle(names)
    began = time.perf_counter()
    with SmallDisk(work / "disk", 64 << 20) as disk:
        campaign = kind(work, disk, choice)
        campaign.go_through(names)
    print(f"\n{len(names)} faults in {time.perf_counter() - began:.0f} s\n")
    print_entries(campaign.entries)
    return 0 if print_table(campaign.bars()) else 1


def telling_line(process: RecipeProcess, output: str) -> str:
    """What the process said in `output` of the fault, in one line; else the last that it said."""
    words = ("NOT SAVED", "cannot be saved", "hangs ", "data worker", " is nan", "failed first", "SIGTERM: ")
    lines = output.splitlines()
    told = (line.strip() for word in words for line in reversed(lines) if word in line)
    return next(told, process.last_line())


def some_text() -> str:
    """The product's own source: 100 kB or so that every checkout has."""
    sources = Path(__file__).resolve().parents[2] / "tputrain"
    return "".join(path.read_text(encoding="utf-8") for path in sorted(sources.glob("*.py")))


def not_logged_once(run: RecipeRun, last: int) -> str:
    """What is wrong with the steps in the run's log; "" where nothing is."""
    if [record["step"] for record in run.steps()] != list(range(1, last + 1)):
        return f"not every step up to {last} is logged once, in order"
    return ""


def say(entry: Entry) -> None:
    """When it has happened."""
    what = entry.complaint
    if (struck := entry.struck) is not None:
        lost = "" if struck.resumed is None else f", lost {struck.lost}"
        problems = "".join(f"; PROBLEM: {each}" for each in struck.problems)
        what = f"{struck.moment}{lost}{problems}: {struck.said[:160]}"
    print(f"{entry.run.directory.name}: {entry.fault}: {what}", flush=True)


def print_entries(entries: list[Entry]) -> None:
    for number, entry in enumerate(entries, 1):
        verdict = "recovered" if entry.holds else f"FAILED: {entry.complaint}"
        if (struck := entry.struck) is None:
            print(f"{number:2}  {entry.fault:30}  {verdict}")
            continue
        lost = "-" if struck.resumed is None else struck.lost
        cost = f"lost {lost:>2} of {struck.may_lose:>2}"
        print(f"{number:2}  {entry.fault:30}  {struck.moment:48}  {cost}  {verdict}")
        for line in struck.said.splitlines():
            print(f"      {line[:170]}")
    print()
