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

import signal
import sys
from pathlib import Path
from typing import ClassVar

from tests.acceptance.campaign import INTERVAL, Campaign, Entry, FaultError, run_campaign
from tests.acceptance.rank_faults import (
    LONGEST_START,
    NUM_RANKS,
    Inflict,
    Scene,
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
from tests.acceptance.two_hosts import TwoHosts
from tests.benchmarks.bars import Row

STEPS = 240
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


class RankCampaign(Campaign):
    name = "rank_campaign"
    recipe = RECIPE
    steps = STEPS
    last_fault_after = 180
    faults: ClassVar = {name: inflict for name, (inflict, _) in FAULTS.items()}
    scene = Scene
    environment: ClassVar = {"TPU_CACHE_DIR": "../programs"}

    @classmethod
    def in_turn(cls) -> list[str]:
        names = [name for name, (_, count) in FAULTS.items() for _ in range(count)]
        if (reason := TwoHosts.why_not()) is not None:
            print(f"the network is not cut: {reason}", flush=True)
            names = [name for name in names if name != "network cut"]
        return names

    def finish(self, scene: Scene, entries: list[Entry]) -> None:
        if entries[-1].struck is None:
            scene.forget()
        try:
            command = scene.training()
            command.wait_for_end(LONGEST_START)
            wrong = "" if command.code == 0 else f"finished with {command.code}"
            if left := command.gone({pid for pid, _, _ in command.processes()}):
                wrong = f"left behind at the end: {', '.join(left)}"
            scene.command = None
        except FaultError as error:
            wrong = f"could not be finished: {error}"
        finally:
            scene.forget()
        self.judge(scene.run, entries, wrong)

    def wrong_in(self, run: RecipeRun) -> str:
        if wrong := super().wrong_in(run):
            return wrong
        for path in sorted(checkpoint_of(self.undisturbed).glob("*.safetensors")):
            if path.read_bytes() != (checkpoint_of(run) / path.name).read_bytes():
                return f"{path.name} of the last checkpoint differs"
        return ""

    def bars(self) -> list[Row]:
        recovered, cost = super().bars()
        of_kills = [
            entry
            for entry in self.entries
            if entry.fault.startswith("SIGKILL") and "launcher" not in entry.fault
        ]
        return [
            recovered,
            Row(
                "SIGKILLs of a rank after which bits differ",
                sum(not entry.holds for entry in of_kills),
                "==",
                0,
                f"of {len(of_kills)}",
            ),
            Row("processes left behind", sum("left" in entry.complaint for entry in self.entries), "==", 0),
            cost,
        ]


def checkpoint_of(run: RecipeRun) -> Path:
    return run.run_dir / "checkpoints" / f"step-{STEPS}"


if __name__ == "__main__":
    sys.exit(run_campaign(RankCampaign, __doc__, num_faults=40))
