"""Proof that a run survives: faults at random moments of small real runs, and what each of them cost.

    python -m tests.acceptance.fault_campaign [--faults 50] [--seed N] [--only NAME] [--work DIR]

Runs of a small Llama on the tpu device are killed, stopped, damaged and starved; after each fault the same
command is given again, until the run is done. In the end each run's losses, every step and every evaluation,
must be to the last bit those of a run that nobody disturbed. Takes 10 to 15 minutes on 2 cores; needs root
(or `unshare -rm` before it) to have a disk that it may fill up. Exits with 1 where a bar does not hold.

Processes find their programs compiled by those before them (JAX's own cache), which saves minutes, but for
those that are to be stopped while they compile.
"""

import sys
from collections.abc import Iterator
from typing import ClassVar

from tests.acceptance.campaign import INTERVAL, Campaign, Entry, not_logged_once, run_campaign
from tests.acceptance.faults import (
    Inflict,
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
from tests.acceptance.recipe_process import RecipeRun, resumed_at
from tests.benchmarks.bars import Row

STEPS = 200
HALF = f"trainer.steps={STEPS // 2}"
"""A run of this length is for a fault that is meant to change what is learnt after it: it is alone in it."""
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
    "NaN batch: skip": ("trainer.on_nonfinite=skip", HALF),
    "NaN batch: rollback": ("trainer.on_nonfinite=rollback", HALF),
}
"""What a run must have for the fault; the others can follow each other in one run."""


class FaultCampaign(Campaign):
    name = "fault_campaign"
    recipe = RECIPE
    steps = STEPS
    last_fault_after = 120
    faults = FAULTS
    scene = Scene
    environment: ClassVar = {
        "JAX_COMPILATION_CACHE_DIR": "../compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def go_through(self, names: list[str], overrides: tuple[str, ...] = ()) -> None:
        for kind in sorted({OVERRIDES.get(name, ()) for name in names}):
            of_kind = [name for name in names if OVERRIDES.get(name, ()) == kind]
            super().go_through(of_kind, (*overrides, *kind))

    def disturb(self, run: RecipeRun, names: list[str]) -> list[str]:
        most = 1 if HALF in run.arguments else len(names)
        return super().disturb(run, names[:most]) + names[most:]

    def finish(self, scene: Scene, entries: list[Entry]) -> None:
        """What each fault cost is told by where the process after it went on."""
        scene.start().wait_for(lambda: False, may_fail=True)
        began_at = list(begun_steps(scene.run))
        for entry in entries:
            struck = entry.struck
            if not isinstance(struck, Struck):
                continue
            if struck.code != struck.expected_code:
                struck.problems.append(f"exit code {struck.code}, expected {struck.expected_code}")
            struck.resumed = next((step for step in began_at[struck.process :] if step is not None), None)
            struck.said += f"\nthen: {what_came_then(scene.run, struck.process)}"
            if struck.resumed is None and struck.expected_code != 0:
                struck.problems.append("no process went on after it")
        self.judge(scene.run, entries)

    def wrong_in(self, run: RecipeRun) -> str:
        if HALF not in run.arguments:
            return super().wrong_in(run)
        # The update that was left out changes what follows: it must be finite, and learning.
        evaluations = run.evaluations()
        is_learnt = evaluations[-1]["loss"] < evaluations[0]["loss"]
        return not_logged_once(run, STEPS // 2) or ("" if is_learnt else "nothing was learnt")

    def bars(self) -> list[Row]:
        recovered, cost = super().bars()
        accepted = [entry for entry in self.entries if "accepted" in entry.complaint]
        terminated = [
            entry.struck.lost
            for entry in self.entries
            if entry.struck is not None and entry.fault.startswith("SIGTERM")
        ]
        return [
            recovered,
            Row("damaged checkpoints accepted", len(accepted), "==", 0),
            Row("steps lost to SIGTERM", max(terminated, default=0), "==", 0),
            cost,
        ]


def begun_steps(run: RecipeRun) -> Iterator[int | None]:
    """The step that each process of a run went on from; None for one that did not come so far."""
    for number in range(1, run.num_processes + 1):
        output = (run.directory / f"output-{number}.txt").read_text(errors="replace")
        if (step := resumed_at(output)) is not None:
            yield step
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


if __name__ == "__main__":
    sys.exit(run_campaign(FaultCampaign, __doc__, num_faults=50))
