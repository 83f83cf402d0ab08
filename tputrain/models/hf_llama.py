"""A Llama from a Hugging Face directory on disk: shape and weights. Nothing is downloaded or unpickled."""

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from tputrain.checkpoint.rows import read_into
from tputrain.checkpoint.tensor_files import DCP_INDEX, TensorFiles
from tputrain.errors import UserError
from tputrain.models.config import LlamaModelConfig
from tputrain.models.llama import LLAMA_CONFIGS, RopeScaling
from tputrain.models.named_tensors import tensors_of_plain_model

if TYPE_CHECKING:
    from tputrain.checkpoint.dcp_files import DcpFiles

CONFIG = "config.json"
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# What our Llama always does; a directory that says otherwise is of another model.
_ALWAYS = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def model_config_of(directory: Path) -> LlamaModelConfig:
    """The shape that `config.json` describes. Raises UserError where our Llama cannot have it."""
    path = directory / CONFIG
    said = _read_json(path)
    kind = said.get("model_type")
    if kind != "llama":
        raise UserError(f"{path}: model_type={kind!r}: expected 'llama', the one kind that can be imported")
    for key, value in _ALWAYS.items():
        if said.get(key, value) != value:
            raise UserError(f"{path}: {key}={said[key]!r}: expected {value!r}, tputrain's Llama has no other")
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    scaling = _rope_scaling(rope, path)
    shape = {
        field.name: said[field.name] for field in fields(LlamaModelConfig) if said.get(field.name) is not None
    }
    shape["rope_theta"] = said.get("rope_theta") or rope.get("rope_theta") or 10_000.0
    heads, hidden = said.get("num_attention_heads"), said.get("hidden_size")
    shape.setdefault("num_key_value_heads", heads)
    shape.setdefault("tie_word_embeddings", False)  # transformers' default, where a file leaves it out
    if type(heads) is int and type(hidden) is int and heads > 0:
        shape.setdefault("head_dim", hidden // heads)
    _check_types(shape, path)
    shape["name"] = _name_for(scaling, path)
    return LlamaModelConfig(**shape)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Copy the `*.safetensors`, or what dcp.save wrote, into the model, in its dtype; a rank reads its part.

    Raises UserError where one does not fit.
    """
    own = tensors_of_plain_model(model)
    files = _weights_in(directory)
    for name in files.names():
        path = files.path(name)
        if name not in own:
            _check_needless(name, model, path)
            continue
        shape, expected = files.shape(name), tuple(own[name].shape)
        if shape != expected:
            raise UserError(f"{path}: {name} has shape {shape}, config.json asks for {expected}")
        read_into(own[name], files, name)
    if left := own.keys() - set(files.names()):
        raise UserError(f"{directory}: the weights lack {sorted(left)[0]} ({len(left)} tensors are missing)")


def _weights_in(directory: Path) -> "TensorFiles | DcpFiles":
    if not (directory / DCP_INDEX).is_file():
        return TensorFiles(directory, "model")
    from tputrain.checkpoint.dcp_files import DcpFiles  # few need it, and it imports much

    return DcpFiles(directory)


def _check_needless(name: str, model: nn.Module, path: Path) -> None:
    # Tied heads are written out by some, and old releases saved the rotation's frequencies.
    is_tied_head = name == "lm_head.weight" and getattr(model, "lm_head", None) is None
    if not (is_tied_head or name.endswith("rotary_emb.inv_freq")):
        raise UserError(f"{path}: it holds {name}, which a Llama of this config.json has not")


def _rope_scaling(rope: Any, path: Path) -> RopeScaling | None:
    if not isinstance(rope, dict):
        raise UserError(f"{path}: rope_scaling={rope!r}: expected keys and values")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"{path}: rope type {kind!r}: expected 'default' or 'llama3'")
    try:
        return RopeScaling(**{field.name: rope[field.name] for field in fields(RopeScaling)})
    except KeyError as error:
        raise UserError(f"{path}: the rope scaling lacks {error}") from None


def _name_for(scaling: RopeScaling | None, path: Path) -> str:
    """A model by name with that stretch of rotations: all else about it is replaced."""
    for name, config in LLAMA_CONFIGS.items():
        if config.rope_scaling == scaling:
            return name
    raise UserError(f"{path}: {scaling}: no model of tputrain stretches its rotations that way")


def _check_types(shape: dict[str, Any], path: Path) -> None:
    for key in _SIZES:
        if type(shape.get(key)) is not int:
            raise UserError(f"{path}: {key}={shape.get(key)!r}: expected a whole number")
    for key in ("rms_norm_eps", "rope_theta"):
        if type(shape.get(key, 1.0)) not in (int, float):
            raise UserError(f"{path}: {key}={shape[key]!r}: expected a number")
    if type(shape["tie_word_embeddings"]) is not bool:
        raise UserError(
            f"{path}: tie_word_embeddings={shape['tie_word_embeddings']!r}: expected true or false"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); expected a Hugging Face directory"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected keys and values, found a {type(values).__name__}")
    return values
