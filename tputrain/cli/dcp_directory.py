"""`tputrain export --format dcp`: a checkpoint as torch.distributed.checkpoint reads it."""

import warnings
from pathlib import Path
from typing import Any

from tputrain.announce import announced
from tputrain.checkpoint.state import load_state
from tputrain.checkpoint.tensor_files import TensorFiles, has_tensors
from tputrain.snapshot.contents import MODEL, OPTIMIZER, TRAINED


def write_dcp(checkpoint: Path, directory: Path) -> None:
    """Write weights and optimizer into `directory`, as `get_state_dict` of PyTorch names them.

    `{"model": {name: tensor}, "optimizer": {"state": {name: {key: value}}, "param_groups": [...]}}`. Files
    are mapped, not read into memory. The weights are those that training goes on with, where the checkpoint
    holds averages as well.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = _tensors(checkpoint, MODEL)
    if has_tensors(checkpoint, TRAINED):
        weights |= _tensors(checkpoint, TRAINED)
    saved = load_state(checkpoint)["optimizer"]
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in saved["values"].items()}
    for full_name, tensor in _tensors(checkpoint, OPTIMIZER).items():
        name, _, key = full_name.rpartition(".")
        states.setdefault(name, {})[key] = tensor
    groups = [group["options"] | {"params": group["params"]} for group in saved["groups"]]
    state = {"model": weights, "optimizer": {"state": states, "param_groups": groups}}
    with announced(f"writing {directory}"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is not needed
        save(state, checkpoint_id=directory, no_dist=True)


def _tensors(checkpoint: Path, stem: str) -> dict[str, Any]:
    files = TensorFiles(checkpoint, stem)
    return {name: files.read(name) for name in files.names()}
