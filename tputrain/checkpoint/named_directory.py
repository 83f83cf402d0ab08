"""What a user means by a directory with a model in it: that one, or a run's newest checkpoint."""

from pathlib import Path

from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.store import CheckpointStore


def model_directory(name: str, only: tuple[str, ...] = ()) -> Path | None:
    """The directory `name`, or, where that is a run, its newest whole checkpoint; None: no such directory.

    `only`: the files of the checkpoint to look into; empty: all.

    Raises UserError where a run has checkpoints and none of them is whole.
    """
    path = Path(name).expanduser()
    if not path.is_dir():
        return None
    if not (path / CHECKPOINTS).is_dir():
        return path
    return CheckpointStore(path / CHECKPOINTS).newest(only=only) or path
