"""Proof that a run of four ranks survives: faults at random moments, and what each of them cost.

    python -m tests.acceptance.rank_campaign [--faults 40] [--seed N] [--only NAME] [--work DIR]

`tputrain run` with four ranks of a tiny Llama. Ranks and launchers are killed, stopped, told to stop,
starved and cut off; ten times a rank is killed at random. After each fault the ranks must train again:
started by the launcher, or by the same command given once more. In the end each run's losses, every step and
every evaluation, and the files of its last checkpoint must be to the last bit those of a run that nobody
disturbed.

Takes 15 to 30 minutes on 2 cores. Needs root, to have a disk that it may fill up and two network namespaces
(where there are none, the network is not cut, and that is said). Exits with 1 where a bar does not hold.
"""

import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from tests.acceptance.fault_campaign import parse_arguments, some_text
from tests.acceptance.main_job import differing_losses
from tests.acceptance.rank_faults import (
    INTERVAL,
    LONGEST_START,
    NUM_RANKS,
    FaultError,
    Inflict,
    Scene,
    Struck,
    damaged,
    disk_full,
    launcher_ended,
    network_cut,
    not_a_number,
    rank_finds_no_room,
    rank_killed,
    rank_raises,
    rank_stopped,
    rank_stuck,
    rank_terminated,
)
from tests.acceptance.recipe_process import RecipeRun
from tests.acceptance.small_disk import SmallDisk
from tests.acceptance.two_hosts import TwoHosts
from tests.benchmarks.bars import Row, print_table

STEPS = 240
LAST_FAULT_AFTER = 180  # a run that has come so far is finished without further faults
RECIPE = f"""
device: tpu
model:
  {{name: llama-5m, vocab_size: 300, hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1,
   num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}}
data: {{files: ../text.txt, vocab_size: 280, sequence_length: 16, cache_dir: ../tokens}}
batch: {{tokens: 128, sequences: 8}}
trainer: {{steps: {STEPS}, evaluate_every: 50, evaluate_batches: 2}}
checkpoint: {{every: {INTERVAL}, keep_last: 3}}
log: {{every: 3, progress: plain}}
sample: {{max_new_tokens: 0}}
watchdog: {{step_seconds: 10, wait_seconds: 30, heartbeat_seconds: 1}}
parallel: {{replicate: 2, shard: 2, processes: {NUM_RANKS}, restarts: 100}}
"""

FAULTS: dict[str, tuple[Inflict, int]] = {
    "SIGKILL: any rank, in a step": (rank_killed(None, "step"), 5),
    "SIGKILL: any rank, in a save": (rank_killed(None, "save"), 2),
    "SIGKILL: any rank, at start-up": (rank_killed(None, "start-up"), 1),
    "SIGKILL: the first rank": (rank_killed(0, "step"), 2),
    "SIGSTOP: a rank": (rank_stopped, 3),
    "SIGTERM: a rank": (rank_terminated, 3),
    "a rank raises": (rank_raises, 3),
    "a rank is stuck in C": (rank_stuck, 2),
    "NaN on a rank": (not_a_number, 3),
    "no room for a rank's part": (rank_finds_no_room, 2),
    "disk full": (disk_full, 2),
    "network cut": (network_cut, 2),
    "checkpoint: flip a bit": (damaged("flip"), 1),
    "checkpoint: truncate a file": (damaged("truncate"), 1),
    "checkpoint: delete a file": (damaged("delete"), 1),
    "SIGKILL: the launcher": (launcher_ended(signal.SIGKILL), 3),
    "SIGTERM: the launcher": (launcher_ended(signal.SIGTERM), 3),
    "SIGINT: the launcher": (launcher_ended(signal.SIGINT), 1),
}
"""By name: the fault, and how often it comes in 40."""


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


def main() -> int:
    options = parse_arguments("rank_campaign", __doc__, FAULTS, number=40)
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    work = options.work or Path(tempfile.mkdtemp(prefix="ranks-"))
    print(f"working in {work}, faults chosen with --seed {seed}", flush=True)
    (work / "text.txt").write_text(some_text())
    (work / "small.yaml").write_text(RECIPE)
    began = time.perf_counter()
    chosen = [name for name, (_, count) in FAULTS.items() for _ in range(count) if options.only in name]
    if (reason := TwoHosts.why_not()) is not None:
        print(f"the network is not cut: {reason}", flush=True)
        chosen = [name for name in chosen if name != "network cut"]
    with SmallDisk(work / "disk", 64 << 20) as disk:
        campaign = Campaign(work, disk, random.Random(seed))
        campaign.choice.shuffle(chosen)
        campaign.go_through(list(islice(cycle(chosen), options.faults)))
    print(f"\n{len(campaign.entries)} faults in {time.perf_counter() - began:.0f} s\n")
    print_entries(campaign.entries)
    return 0 if print_table(bars(campaign.entries)) else 1


class Campaign:
    """Runs, one after the other, that faults are done to."""

    def __init__(self, work: Path, disk: SmallDisk, choice: random.Random):
        self.work, self.disk, self.choice = work, disk, choice
        self.environment = {"TPU_CACHE_DIR": str(work / "programs")}
        self.entries: list[Entry] = []
        self.num_runs = 0
        self.undisturbed = self.new_run("undisturbed")
        began = time.perf_counter()
        self.undisturbed.start(("tputrain.cli",), self.environment).wait_for(lambda: False)
        seconds = time.perf_counter() - began
        print(f"undisturbed: {self.undisturbed.last_step()} steps in {seconds:.0f} s", flush=True)

    def new_run(self, name: str) -> RecipeRun:
        """A run whose directory is on the disk that can be filled, and its output elsewhere."""
        directory = self.work / name
        (self.disk.path / name).mkdir()
        directory.mkdir()
        (directory / "runs").symlink_to(self.disk.path / name)
        return RecipeRun(directory, self.work / "small.yaml", ())

    def go_through(self, names: list[str]) -> None:
        while names:
            self.num_runs += 1
            names = self.disturb(self.new_run(f"run-{self.num_runs}"), names)

    def disturb(self, run: RecipeRun, names: list[str]) -> list[str]:
        """Do as many of these faults as the run has room for, and finish it; returns those left over."""
        scene = Scene(run, self.choice, self.disk, self.environment)
        entries: list[Entry] = []
        left, is_lost = list(names), False
        while left and not is_lost and scene.run.newest_step() < LAST_FAULT_AFTER:
            entry = Entry(left.pop(0), run)
            entries.append(entry)
            try:
                entry.struck = FAULTS[entry.fault][0](scene)
            except FaultError as error:
                entry.complaint = f"{type(error).__name__}: {error}"
                is_lost = True
                scene.forget()
            self.say(entry)
        self.judge(scene, entries)
        self.entries += entries
        return left

    def say(self, entry: Entry) -> None:
        struck, what = entry.struck, entry.complaint
        if struck is not None:
            problems = "".join(f"; PROBLEM: {each}" for each in struck.problems)
            what = (
                f"{struck.moment}, lost {struck.lost}, {struck.seconds:.0f} s{problems}: {struck.said[:160]}"
            )
        print(f"{entry.run.directory.name}: {entry.fault}: {what}", flush=True)

    def judge(self, scene: Scene, entries: list[Entry]) -> None:
        """Finish the run, and say of each fault what was wrong with it or with the run."""
        try:
            command = scene.training()
            command.wait_for_end(LONGEST_START)
            wrong = "" if command.code == 0 else f"finished with {command.code}"
            if left := command.gone({pid for pid, _, _ in command.processes()}):
                wrong = f"left behind at the end: {', '.join(left)}"
            scene.command = None
            wrong = wrong or self.wrong_in(scene.run)
        except FaultError as error:
            wrong = f"could not be finished: {error}"
        finally:
            scene.forget()
        if wrong:
            print(f"{scene.run.directory.name}: {wrong}", flush=True)
        for entry in entries:
            struck = entry.struck
            if struck is None:
                continue
            problems = list(struck.problems)
            if struck.lost > struck.may_lose:
                problems.append(f"lost {struck.lost} steps, at most {struck.may_lose}")
            entry.complaint = "; ".join([*problems, *([wrong] if wrong else [])])

    def wrong_in(self, run: RecipeRun) -> str:
        """Where the finished run differs from the undisturbed one; "" where it does not."""
        if [record["step"] for record in run.steps()] != list(range(1, STEPS + 1)):
            return f"not every step up to {STEPS} is logged once, in order"
        for name in ("steps", "evaluations"):
            if different := differing_losses(getattr(self.undisturbed, name)(), getattr(run, name)()):
                return f"{len(different)} losses of {name} differ, first {different[0]}"
        for path in sorted(checkpoint_of(self.undisturbed).glob("*.safetensors")):
            if path.read_bytes() != (checkpoint_of(run) / path.name).read_bytes():
                return f"{path.name} of the last checkpoint differs"
        return ""


def checkpoint_of(run: RecipeRun) -> Path:
    return run.run_dir / "checkpoints" / f"step-{STEPS}"


def print_entries(entries: list[Entry]) -> None:
    for number, entry in enumerate(entries, 1):
        struck = entry.struck
        verdict = "recovered" if entry.holds else f"FAILED: {entry.complaint}"
        if struck is None:
            print(f"{number:2}  {entry.fault:30}  {verdict}")
            continue
        lost = f"lost {struck.lost:>2} of {struck.may_lose:>2}"
        print(
            f"{number:2}  {entry.fault:30}  {struck.moment:34}  {struck.seconds:>4.0f} s  {lost}  {verdict}"
        )
        print(f"      {struck.said[:170]}")
    print()


def bars(entries: list[Entry]) -> list[Row]:
    failed = [entry for entry in entries if not entry.holds]
    struck = [entry.struck for entry in entries if entry.struck is not None]
    too_many = [each for each in struck if each.lost > each.may_lose]
    of_kills = [
        entry for entry in entries if entry.fault.startswith("SIGKILL") and "launcher" not in entry.fault
    ]
    return [
        Row(
            "faults not recovered from",
            len(failed),
            "==",
            0,
            "; ".join(f"{entry.fault}: {entry.complaint}" for entry in failed[:3]) or f"of {len(entries)}",
        ),
        Row(
            "SIGKILLs of a rank after which bits differ",
            sum(not entry.holds for entry in of_kills),
            "==",
            0,
            f"of {len(of_kills)}",
        ),
        Row("processes left behind", sum("left" in entry.complaint for entry in entries), "==", 0),
        Row(
            "faults that cost more steps than they may",
            len(too_many),
            "==",
            0,
            f"an interval is {INTERVAL}; most lost {max((each.lost for each in struck), default=0)}",
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
