"""Choosing a model by name, with changes, from a configuration file."""

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from tputrain.config_checks import expect, expect_choice
from tputrain.errors import UserError
from tputrain.models.huggingface import INITS, limits, load_huggingface
from tputrain.models.imported import import_model
from tputrain.models.init import initialize
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig

_PATHS = {"huggingface": "directory or name", "import": "package.module:function"}


@dataclass(frozen=True)
class ModelConfig:
    """A model by name; a size below, where it is not None, replaces what the name of a Llama stands for."""

    name: str = "llama-5m"
    """llama-...; huggingface: what is at `path`; import: what the code at `path` makes (trust_code=true)."""
    path: str | None = None
    """huggingface: a directory or a name on the hub; import: package.module:function."""
    init: str = "weights"
    """huggingface: weights (those that are there) or random."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    rope_theta: float | None = None
    rms_norm_eps: float | None = None
    tie_word_embeddings: bool | None = None
    activation_checkpointing: bool | None = None

    def __post_init__(self) -> None:
        expect_choice("model.init", self.init, INITS)
        if not self.is_elsewhere:
            self.resolve()
            expect(self.path is None, "model.path", self.path, f"nothing with model.name={self.name}")
            return
        expect(bool(self.path), "model.path", self.path, f"a {_PATHS[self.name]} with model.name={self.name}")
        for key, value in self._sizes().items():
            expect(False, f"model.{key}", value, f"nothing with model.name={self.name}, which has its own")

    @property
    def is_elsewhere(self) -> bool:
        """Whether the model is not one of this library's."""
        return self.name in _PATHS

    def limits(self) -> tuple[int | None, int | None]:
        """Positions and vocabulary, where they are known before the model is built."""
        if self.name == "huggingface":
            return limits(str(self.path))
        if self.is_elsewhere:
            return None, None
        shape = self.resolve()
        return shape.max_position_embeddings, shape.vocab_size

    def _sizes(self) -> dict[str, Any]:
        own = {"name", "path", "init"}
        return {key: value for key, value in asdict(self).items() if key not in own and value is not None}

    def resolve(self) -> LlamaConfig:
        """The full shape. Raises UserError where the name is unknown or the fields do not fit each other."""
        if self.name not in LLAMA_CONFIGS:
            nearest = get_close_matches(self.name, [*LLAMA_CONFIGS, *_PATHS], n=1, cutoff=0.0)[0]
            known = ", ".join([*LLAMA_CONFIGS, *_PATHS])
            raise UserError(
                f"model.name={self.name}: no such model, did you mean {nearest}? (known: {known})"
            )
        return replace(LLAMA_CONFIGS[self.name], **self._sizes())


def build_model(cfg: ModelConfig) -> Llama:
    """A Llama with parameters allocated (on the current default device) but not in their initial values.

    `tputrain.models.initialize(model, seed)` gives those.
    """
    return Llama(cfg.resolve())


def build_initialized(cfg: ModelConfig, seed: int) -> nn.Module:
    """The model of `cfg`, wherever it comes from, in its initial values."""
    if cfg.name == "huggingface":
        return load_huggingface(str(cfg.path), cfg.init, seed)
    if cfg.name == "import":
        torch.manual_seed(seed)
        return import_model(str(cfg.path))
    model = build_model(cfg)
    initialize(model, seed)
    return model
