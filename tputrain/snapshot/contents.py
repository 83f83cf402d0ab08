"""What a checkpoint holds: tensors as safetensors, everything else as JSON. Nothing is ever unpickled.

model.safetensors      parameters and buffers under the model's own names, tied ones once
trained.safetensors    only where the weights above are averages: those that training goes on with
optimizer.safetensors  `<parameter>.<key>` for every tensor of the optimizer's state
state.json             everything else, one dict
config.json, generation_config.json, tokenizer files: see `tputrain.checkpoint.configuration`
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from tputrain.checkpoint.integrity import CHECKSUMS, COMPLETE
from tputrain.checkpoint.rows import Rows, read_into, read_like, rows_of
from tputrain.checkpoint.state import STATE as STATE
from tputrain.checkpoint.state import load_state as load_state
from tputrain.checkpoint.state import state_text as state_text
from tputrain.checkpoint.state import write_state as write_state
from tputrain.checkpoint.tensor_files import Layout, TensorFiles, TensorSpec, check_dtype, has_tensors
from tputrain.checkpoint.unsealed import WRITTEN
from tputrain.errors import UserError
from tputrain.models.lora import lora_layers
from tputrain.models.named_tensors import tensors_of_plain_model
from tputrain.optim.numbers import as_numbers, like

MODEL, TRAINED, OPTIMIZER = "model", "trained", "optimizer"
"""Stems of the names of the files with tensors, of which a large model has several."""
_AVERAGE = ".average"  # after the name of a parameter of LoRA's
_TRAINING_ONLY = (STATE, CHECKSUMS, COMPLETE, WRITTEN)


def is_for_training_only(file: str) -> bool:
    """Whether only going on with the training needs it: other files belong to the model or the tokenizer."""
    is_of_training = file.endswith((".safetensors", ".safetensors.index.json")) and file.startswith(
        (f"{TRAINED}.", f"{TRAINED}-", f"{OPTIMIZER}.", f"{OPTIMIZER}-")
    )
    return is_of_training or file in _TRAINING_ONLY


def layout_of(stem: str, tensors: Mapping[str, Rows]) -> Layout:
    """The files of these tensors."""
    # transformers refuses a file that does not say which framework's conventions it follows.
    return Layout(stem, {name: rows.whole for name, rows in tensors.items()}, {"format": "pt"})


def own_rows(tensors: Mapping[str, Rows]) -> dict[str, tuple[int, Tensor]]:
    """What this rank writes of these tensors: by name the first row and the rows."""
    return {name: (rows.first, rows.tensor) for name, rows in tensors.items() if rows.tensor is not None}


def model_tensors(model: nn.Module) -> dict[str, Rows]:
    """Copies, on the host, of what model.safetensors holds; one that shares another's memory in full."""
    return {name: rows_of(tensor) for name, tensor in _plain_tensors(model)}


def check_dtypes(model: nn.Module) -> None:
    """Raise UserError where no checkpoint can hold one of the model's tensors."""
    for name, tensor in tensors_of_plain_model(model).items():
        check_dtype(name, tensor.dtype)


def load_model(model: nn.Module, directory: Path) -> None:
    """Copy model.safetensors into the model's tensors, in place, so that what is tied stays tied."""
    files, own = TensorFiles(directory, MODEL), tensors_of_plain_model(model)
    for name in sorted(own.keys() ^ files.names()):
        holder, other = ("model", "file") if name in own else ("file", "model")
        raise UserError(
            f"{files.first}: the {holder} has a tensor {name!r} that the {other} has not; another model?"
        )
    for name, tensor in own.items():
        module, _, last = name.rpartition(".")
        if last == _EXTRA_STATE_KEY_SUFFIX:  # made for the occasion: what is written into it nobody sees
            model.get_submodule(module).set_extra_state(files.read(name).clone())
        else:
            _read_same_shape(tensor, files, name)


def _read_same_shape(tensor: Tensor, files: TensorFiles, name: str) -> None:
    """`read_into`, which alone would broadcast. Raises UserError where the file has another shape."""
    shape = files.shape(name)
    if shape != tuple(tensor.shape):
        raise UserError(
            f"{files.path(name)}: {name} has shape {shape}, the model's has {tuple(tensor.shape)}"
        )
    read_into(tensor, files, name)


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the model that any reader knows: LoRA's products are part of the weights, made one by
    one.
    """
    layers = {f"{name}.weight": layer for name, layer in lora_layers(model)}
    for name, tensor in tensors_of_plain_model(model).items():
        yield name, layers[name].merged_weight() if name in layers else tensor


def trained_tensors(model: nn.Module, trained: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Copies, on the host, of the weights that training goes on with where model.safetensors holds others.

    `trained`: those in whose place the model holds averages just now.
    """
    own = {
        f"{name}.{own}": tensor
        for name, layer in lora_layers(model)
        for own, tensor in layer.named_parameters()
        if own != "bias"
    }
    averages = {f"{name}{_AVERAGE}": tensor for name, tensor in own.items() if name in trained}
    weights = own | averages | dict(trained)
    return {name: rows_of(tensor) for name, tensor in weights.items()}


@torch.no_grad()
def load_lora_averages(model: nn.Module, directory: Path) -> None:
    """Put averages of LoRA's products in the place of these, if the checkpoint holds any: there the model has
    but the weights that they are part of.
    """
    if has_tensors(directory, TRAINED):
        own, files = dict(model.named_parameters()), TensorFiles(directory, TRAINED)
        for name in files.names():
            if (parameter := own.get(name.removesuffix(_AVERAGE))) is not None and name.endswith(_AVERAGE):
                _read_same_shape(parameter, files, name)


@torch.no_grad()
def load_trained_weights(model: nn.Module, directory: Path) -> None:
    """Put back what `trained_tensors` gave, if the checkpoint holds any."""
    if not has_tensors(directory, TRAINED):
        return
    own, files = dict(model.named_parameters()), TensorFiles(directory, TRAINED)
    for name in files.names():
        if name.endswith(_AVERAGE):
            continue
        if name not in own:
            raise UserError(
                f"{files.path(name)}: the file has a tensor {name!r} that the model has not; another model?"
            )
        _read_same_shape(own[name], files, name)


def optimizer_contents(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, Rows], dict[str, Any]]:
    """Copies, on the host, of the optimizer's tensors, and the rest of it (numbers, groups)."""
    names = parameter_names(model)
    tensors: dict[str, Rows] = {}
    values: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for parameter, state in dict[Any, Any](optimizer.state).items():
        if not isinstance(parameter, Tensor):
            own[_own_key(optimizer, parameter, state)] = state
            continue
        name = names[id(parameter)]
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = rows_of(value)
            elif isinstance(value, bool | int | float | str | None):
                values.setdefault(name, {})[key] = value
            else:
                raise UserError(
                    f"the state of {type(optimizer).__name__} holds a {type(value).__name__} ({key!r}): "
                    "a checkpoint can hold tensors, numbers and text"
                )
    groups = [
        {"params": [names[id(p)] for p in group["params"]], "options": _plain_options(group)}
        for group in optimizer.param_groups
    ]
    return tensors, {"kind": _kind(optimizer), "values": values, "groups": groups, "own": own}


def _own_key(optimizer: torch.optim.Optimizer, key: Any, state: Any) -> str:
    """`key`, of state that belongs to no parameter. Raises UserError where the two are not JSON."""
    try:
        is_json = isinstance(key, str) and json.loads(json.dumps(state)) == state
    except (TypeError, ValueError):
        is_json = False
    if not is_json:
        raise UserError(
            f"the state of {type(optimizer).__name__} under {key!r}, which is no parameter, is a "
            f"{type(state).__name__}: a checkpoint can hold numbers, text, and lists and dicts of these "
            "under a text key"
        )
    return str(key)


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    directory: Path,
    rest: dict[str, Any],
    options: Collection[str] | None,
) -> None:
    """Put back what `optimizer_contents` gave, with these of the groups' options (learning rate, betas and
    their like); None: with all."""
    files = TensorFiles(directory, OPTIMIZER)
    path = files.first
    kind = _kind(optimizer)
    # Checkpoints made before kinds were kept do not say theirs; later ones said the class, without its parts.
    if rest.get("kind", kind) not in (kind, type(optimizer).__name__):
        raise UserError(
            f"{path}: it is the state of {rest['kind']}, and this run's optimizer is {kind}: "
            "go on with the one the run was started with (optim.name, optim.master_weights in a recipe), or "
            "choose another run_dir"
        )
    names = parameter_names(model)
    groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if groups != [group["params"] for group in rest["groups"]]:
        raise UserError(
            f"{path}: its parameter groups are not this optimizer's; "
            "resume with the optimizer the run was started with"
        )
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in rest["values"].items()}
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    unknown = sorted({*states, *(name.rpartition(".")[0] for name in files.names())} - numbers.keys())
    if unknown:
        raise UserError(f"{path}: it holds state of {unknown[0]!r}, which this optimizer does not train")
    parameters = dict(model.named_parameters())
    for full_name in files.names():
        name, _, key = full_name.rpartition(".")
        own = optimizer.state.get(parameters[name], {}).get(key)
        if isinstance(own, Tensor) and files.spec(full_name) == TensorSpec(tuple(own.shape), own.dtype):
            read_into(own, files, full_name)  # no second copy of all state, however short-lived
        else:
            own = read_like(parameters[name], files, full_name)
        states.setdefault(name, {})[key] = own
    described = optimizer.state_dict()
    for group, saved in zip(described["param_groups"], rest["groups"], strict=True):
        taken = {k: v for k, v in saved["options"].items() if options is None or k in options}
        group.update(like(taken, group))
    described["state"] = {numbers[name]: state for name, state in states.items()} | rest.get("own", {})
    # PyTorch's own loading knows which state belongs on the device and which (step counts) on the host.
    optimizer.load_state_dict(described)


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return getattr(optimizer, "kind", type(optimizer).__name__)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter, by its identity."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _plain_options(group: dict[str, Any]) -> dict[str, Any]:
    return as_numbers({key: value for key, value in group.items() if key != "params"})
