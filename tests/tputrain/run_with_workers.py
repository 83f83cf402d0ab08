"""A run whose batches are made by processes: `python -m tests.tputrain.run_with_workers RUN_DIR OPTION...`.

OPTION: spawn or fork, persistent (workers that outlive an epoch), tpu (else the cpu), slow (a batch takes
seconds), late (a spawned worker takes seconds until it has its data). It prints a line at every moment at
which somebody may want to send it a signal: MOMENTS.
"""

import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tputrain import CheckpointConfig, LogConfig, RunConfig, Trainer, TrainerConfig
from tputrain.callbacks.callback import Callback
from tputrain.snapshot import contents

MOMENTS = ("started", "stepping", "evaluating", "saving", "ending", "ended")
STEPS = 40


def say(moment: str) -> None:
    print(f"moment: {moment}", flush=True)


class Samples(Dataset):
    def __init__(self, count: int, seconds: float, late: float):
        self.count, self.seconds, self.late = count, seconds, late

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        time.sleep(self.late)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.seconds)
        return torch.full((4,), index / self.count), index % 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.has_evaluated = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)), False

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and not self.has_evaluated:
            self.has_evaluated = True
            say("evaluating")
        return self.net(inputs)


class Moments(Callback):
    def on_fit_start(self, trainer: Trainer) -> None:
        say("started")

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.step == 3:
            say("stepping")
        if trainer.step == STEPS:
            say("ending")


def main(run_dir: Path, options: set[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    write_state = contents.write_state

    def write_state_loudly(text: str, directory: Path) -> None:
        say("saving")
        write_state(text, directory)

    contents.write_state = write_state_loudly
    method = "spawn" if "spawn" in options else "fork"
    workers = {"num_workers": 2, "multiprocessing_context": method}
    workers |= {"persistent_workers": "persistent" in options}
    # Spawned workers take seconds to start: one epoch, and evaluations at its ends alone.
    count, evaluate_every = (48, 20) if method == "fork" else (4 * STEPS, STEPS)
    data = Samples(count, 2.0 if "slow" in options else 0.001, 8.0 if "late" in options else 0.0)
    loaders = {
        "train_loader": DataLoader(data, batch_size=4, shuffle=True, **workers),
        "val_loader": DataLoader(data, batch_size=16, **workers),
    }
    cfg = RunConfig(
        device="tpu" if "tpu" in options else "cpu",
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=STEPS, evaluate_every=evaluate_every),
        checkpoint=CheckpointConfig(every=9),
        log=LogConfig(every=5, progress="none"),
    )
    Trainer(Model(), cfg, callbacks=[Moments()], **loaders).fit()
    say("ended")


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
