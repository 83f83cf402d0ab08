"""The files of a checkpoint that say what its model and tokenizer are, as Hugging Face has them."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

from torch import nn

_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_GENERATION = "generation_config.json"


def write_configuration(model: nn.Module, tokenizer: Any, directory: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer's files, as far as there are any.

    The model's come from its `save_config(directory)`, or, for a model of transformers, from its `config`;
    the tokenizer's from `save(directory)` or `save_pretrained(directory)`. The special tokens that the
    configuration names are those of the tokenizer.
    """
    if callable(save_config := getattr(model, "save_config", None)):
        save_config(directory)
    elif is_of_transformers(model):
        save_transformers_config(model, directory)
    if tokenizer is not None:
        save = getattr(tokenizer, "save", None) or tokenizer.save_pretrained
        save(directory)
        _write_special_ids(tokenizer, directory)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether `model` is itself a model of transformers, whose weights have the names that it reads."""
    modeling = sys.modules.get("transformers.modeling_utils")  # who has made one has imported it
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def save_transformers_config(model: Any, directory: Path) -> None:
    """Write config.json and, of a model that generates, generation_config.json."""
    config = copy.deepcopy(model.config)  # the training, in another thread, keeps its own
    config.architectures, config.dtype = [type(model).__name__], model.dtype
    # Not its save_pretrained: that refuses settings of the generation in it.
    config.to_json_file(directory / "config.json")
    if (generation := getattr(model, "generation_config", None)) is not None:
        # Not its save_pretrained: that refuses settings which the model was loaded with.
        generation.to_json_file(directory / _GENERATION)


def padding_of(model: nn.Module) -> int | None:
    """The token whose embedding gets no gradient. In a model of transformers, config.json would decide it."""
    if not is_of_transformers(model):
        return None
    try:
        return getattr(model.get_input_embeddings(), "padding_idx", None)  # type: ignore[operator]
    except NotImplementedError:
        return None  # it reads no tokens


def _write_special_ids(tokenizer: Any, directory: Path) -> None:
    """Have the configuration name the special tokens of `tokenizer`, which the model was trained with."""
    ids = {name: getattr(tokenizer, name) for name in _IDS if hasattr(tokenizer, name)}
    config = _read(directory / "config.json")
    if config is None or "model_type" not in config:
        return  # a format of the user's own
    vocab_size = config.get("vocab_size")
    for name, index in ids.items():
        # A model whose vocabulary lacks the token could not be read back: it makes its embedding by the id.
        if index is None or not isinstance(vocab_size, int) or index < vocab_size:
            config[name] = index
    _write(directory / "config.json", config)
    if (generation := _read(directory / _GENERATION)) is not None:
        for name, index in ids.items():
            ends = generation.get(name)
            if not (isinstance(ends, list) and index in ends):  # several tokens may end a text
                generation[name] = index
        kept = {name: value for name, value in generation.items() if name not in ids or value is not None}
        _write(directory / _GENERATION, kept)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
