"""What a run goes on from, and whether its recipe still says the same run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tputrain.announce import say
from tputrain.checkpoint.store import CheckpointStore, say_nothing
from tputrain.config_checks import spelled
from tputrain.config_differences import changed_settings
from tputrain.data import Tokenizer
from tputrain.errors import UserError
from tputrain.recipe import RecipeConfig
from tputrain.run_lock import RunLock, is_locked
from tputrain.snapshot import contents

_FIXED = ("model.", "lora.", "data.", "batch.", "optim.name", "optim.master_weights", "seed")
"""What a run keeps for its whole life: with any of it changed, going on would be another run."""
_FIXED_AT_IMPORT = ("model.", "data.vocab_size", "seed")
"""What an imported run keeps: there are weights and a tokenizer, and nothing has been trained on."""
_FREE = (
    "batch.sequences",
    "data.cache_dir",
    "data.prefetch",
    "data.workers",
    "model.activation_checkpointing",
)
"""What is below those and changes nothing."""


def started_from(cfg: RecipeConfig) -> Path | None:
    """What the run goes on from, if it was started. Raises UserError where that is another run's.

    Only small files are looked into, so that a large checkpoint is read once, by whoever needs all of it; a
    damaged one is spoken of then.
    """
    checkpoint = newest_checkpoint(cfg, only=(contents.STATE, Tokenizer.FILE))
    if checkpoint is not None:
        check_same_run(cfg, contents.load_state(checkpoint), checkpoint)
    return checkpoint


def newest_checkpoint(cfg: RecipeConfig, only: tuple[str, ...] = ()) -> Path | None:
    """As `CheckpointStore.newest`, after what an earlier process left was finished and the mirror asked."""
    store = CheckpointStore.of_run(str(cfg.run_dir), cfg.checkpoint)
    with locked_where_changed(store, str(cfg.run_dir)):
        return store.newest(say_nothing, only)


def copy_missed(cfg: RecipeConfig, checkpoint: Path) -> None:
    """As `CheckpointStore.copy_missed`, of a run that nobody trains."""
    run_dir, step = Path(str(cfg.run_dir)), contents.load_state(checkpoint)["step"]
    if cfg.checkpoint.mirror is not None and not is_locked(run_dir):  # else that process may be copying
        with RunLock(run_dir):
            CheckpointStore.of_run(str(run_dir), cfg.checkpoint).copy_missed(step)


@contextmanager
def locked_where_changed(store: CheckpointStore, run_dir: str) -> Iterator[None]:
    """In here, the run is this process's alone if there is anything to finish or to fetch."""
    if not store.needs_lock():
        yield
        return
    with RunLock(Path(run_dir)):
        store.take_over()
        yield


def check_same_run(cfg: RecipeConfig, state: dict[str, Any], checkpoint: Path) -> None:
    """Refuse, and name, settings that make it another run; the Trainer tells of the other changes."""
    changes = changed_settings(state["config"], cfg)
    # An imported model was trained on nothing yet: any data will do.
    is_untrained = state["step"] == 0 and state.get("data") is None
    fixed = _FIXED_AT_IMPORT if is_untrained else _FIXED
    refused = [key for key in changes if key.startswith(fixed) and key not in _FREE]
    for key in refused:
        old, new = changes[key]
        say(f"refused: {key} would be {spelled(new)}, it was {spelled(old)}")
    if refused:
        given = ", ".join(f"{key}={spelled(changes[key][1])}" for key in refused)
        before = ", ".join(f"{key}={spelled(changes[key][0])}" for key in refused)
        raise UserError(
            f"{given}: {checkpoint} was made with {before}; set {'it' if len(refused) == 1 else 'them'} "
            "back, or choose another run_dir"
        )
