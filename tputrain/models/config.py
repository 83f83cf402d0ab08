"""Choosing a model by name, with changes, from a configuration file."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tputrain.config_checks import expect, expect_choice, nearest
from tputrain.errors import UserError
from tputrain.models.huggingface import (
    INITS,
    build_huggingface,
    limits,
    limits_said,
    load_huggingface,
)
from tputrain.models.imported import import_model
from tputrain.models.init import initialize
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig
from tputrain.models.vit import VIT_CONFIGS, Vit, VitConfig

_ELSEWHERE = ("huggingface", "import")


@dataclass(frozen=True)
class ModelConfig:
    """A model by name; a size below, where it is not None, replaces what the name of a Llama stands for."""

    name: str = "llama-5m"
    """llama-...; huggingface: what is at `path`, or what `config` describes; import: what the code at `path`
    makes (trust_code=true); vit-digits."""
    path: str | None = None
    """huggingface: a directory, a run or a name on the hub; import: package.module:function; llama-...: a
    directory or a run whose weights to begin with (None: random ones)."""
    init: str = "weights"
    """huggingface, llama-...: weights (those at `path`) or random."""
    config: dict[str, Any] = field(default_factory=dict)
    """huggingface without `path`: model_type and that type's own settings; its weights are random."""
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
        condition = f"with model.name={self.name}"
        if self.name == "huggingface":
            self._check_one_of_path_and_config()
        else:
            expect(not self.config, "model.config", self.config, f"nothing {condition}")
        if self.name == "import":
            expect(bool(self.path), "model.path", self.path, f"package.module:function {condition}")
        if self.is_elsewhere:
            for key, value in self._sizes().items():
                is_known = (self.name, key) == ("huggingface", "activation_checkpointing")
                expect(is_known, f"model.{key}", value, f"nothing {condition}")
        else:
            self.resolve()
            expect(not (self.is_vision and self.path), "model.path", self.path, f"nothing {condition}")

    def _check_one_of_path_and_config(self) -> None:
        expect(
            bool(self.path) or bool(self.config),
            "model.path",
            self.path,
            "a directory, a run or a name with model.name=huggingface (or model.config, to describe a model)",
        )
        expect(
            not (self.path and self.config),
            "model.config",
            self.config,
            f"nothing beside model.path={self.path}, which has its own",
        )

    @property
    def is_elsewhere(self) -> bool:
        """Whether the model is not one of this library's."""
        return self.name in _ELSEWHERE

    @property
    def is_vision(self) -> bool:
        """Whether the model is one of this library's that sees images."""
        return self.name in VIT_CONFIGS

    def limits(self) -> tuple[int | None, int | None]:
        """Positions and vocabulary, where they are known before the model is built."""
        if self.name == "huggingface":
            return limits(self.path) if self.path else limits_said(self.config)
        if self.is_elsewhere:
            return None, None
        shape = self.resolve()
        if isinstance(shape, VitConfig):
            return None, None
        return shape.max_position_embeddings, shape.vocab_size

    def _sizes(self) -> dict[str, Any]:
        own = {"name", "path", "init", "config"}
        return {key: value for key, value in asdict(self).items() if key not in own and value is not None}

    def resolve(self) -> LlamaConfig | VitConfig:
        """The full shape. Raises UserError where the name is unknown or the fields do not fit each other."""
        shape = (LLAMA_CONFIGS | VIT_CONFIGS).get(self.name)
        if shape is None:
            names = [*LLAMA_CONFIGS, *VIT_CONFIGS, *_ELSEWHERE]
            hint = nearest(self.name, names)
            suggestion = f", did you mean {hint}?" if hint else ""
            raise UserError(f"model.name={self.name}: no such model{suggestion} (known: {', '.join(names)})")
        sizes = self._sizes()
        for key, value in sizes.items():
            expect(hasattr(shape, key), f"model.{key}", value, f"nothing with model.name={self.name}")
        return replace(shape, **sizes)


def build_model(cfg: ModelConfig) -> Llama | Vit:
    """One of this library's models, its parameters allocated (on the current default device) but not in their
    initial values.

    `tputrain.models.initialize(model, seed)` gives those.
    """
    shape = cfg.resolve()
    return Llama(shape) if isinstance(shape, LlamaConfig) else Vit(shape)


def build_initialized(cfg: ModelConfig, seed: int) -> nn.Module:
    """The model of `cfg`, wherever it comes from, in its initial values.

    A Llama's are random: what is at its `path` is read by who has use for it (`models.hf_llama`).
    """
    if cfg.name == "huggingface":
        recomputes = bool(cfg.activation_checkpointing)
        if cfg.path is None:
            return build_huggingface(cfg.config, seed, recomputes)
        return load_huggingface(cfg.path, cfg.init, seed, recomputes)
    if cfg.name == "import":
        torch.manual_seed(seed)
        return import_model(str(cfg.path))
    model = build_model(cfg)
    initialize(model, seed)
    return model
