"""`tputrain export`: a checkpoint as a Hugging Face directory, or as one of torch.distributed.checkpoint."""

import os
import shutil
from pathlib import Path

from tputrain.announce import say
from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.integrity import COMPLETE
from tputrain.checkpoint.state import STATE
from tputrain.checkpoint.store import CheckpointStore, damage
from tputrain.cli.early_mistakes import new_directory
from tputrain.data.pretrained_tokenizer import MARK
from tputrain.errors import UserError
from tputrain.snapshot.contents import is_for_training_only


def export(target: str, out: str, form: str) -> int:
    """Copy weights, configuration and tokenizer of a checkpoint to the new directory `out`.

    `form`: hf; or dcp, in which torch.distributed.checkpoint loads weights and optimizer.
    """
    checkpoint = _checkpoint(Path(target))
    names = sorted(path.name for path in checkpoint.iterdir())
    names = [name for name in names if name != MARK and not is_for_training_only(name)]
    if form == "dcp":
        names = [name for name in names if ".safetensors" not in name]
    elif "config.json" not in names:
        raise UserError(
            f"{checkpoint}: its model wrote no config.json, so it is no Hugging Face model; give the model a "
            "save_config(directory), or read model.safetensors itself"
        )
    directory = new_directory(out)
    unfinished = directory.with_name(f".unfinished-{directory.name}")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for name in names:
            shutil.copyfile(checkpoint / name, unfinished / name)
        if form == "dcp":
            from tputrain.cli.dcp_directory import write_dcp

            write_dcp(checkpoint, unfinished)
        os.rename(unfinished, directory)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise UserError(f"{directory}: cannot be written ({error.strerror}); choose another place") from None
    if form == "dcp":
        say(f"{directory}: {checkpoint} for torch.distributed.checkpoint.load")
    else:
        say(f"{directory}: {checkpoint} as a Hugging Face directory: {', '.join(names)}")
    return 0


def _checkpoint(target: Path) -> Path:
    """A whole checkpoint: the one named, or the newest of the run named."""
    if (target / COMPLETE).is_file() or (target / STATE).is_file():
        reason = damage(target)
        if reason is not None:
            raise UserError(f"{target} cannot be exported: {reason}; take another checkpoint")
        return target
    if not target.is_dir():
        raise UserError(f"{target}: no such directory; expected a run, such as runs/llama, or a checkpoint")
    newest = CheckpointStore(target / CHECKPOINTS).newest()
    if newest is None:
        raise UserError(f"{target}: no checkpoint in it; expected a run, such as runs/llama, or a checkpoint")
    return newest
