"""Choosing a model by name, with changes: a configuration for each kind, which builds its own."""

from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from tputrain.config_checks import expect, expect_choice
from tputrain.hub import is_path
from tputrain.kinds import Family
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
from tputrain.models.recompute import SETTINGS, read_setting, rung_of
from tputrain.models.vit import VIT_CONFIGS, Vit, VitConfig

Limits = tuple[int | None, int | None]
"""Positions and vocabulary, where they are known."""


@dataclass(frozen=True)
class ModelConfig(Family, group="model", by="name"):
    """A model by name. Nothing is read from the disk before it is built."""

    name: str = "llama-5m"
    """llama-...; huggingface: what is at `path`, or what `config` describes; import: what the code at `path`
    makes (trust_code=true); vit-digits."""

    reads_text: ClassVar[bool | None] = True
    """Whether its input is tokens, else images; None: only its code knows."""
    runs_code: ClassVar[bool] = False
    """Whether the recipe names code, which is run."""
    is_transformers: ClassVar[bool] = False
    """Whether `transformers` builds it."""
    can_recompute: ClassVar[bool] = False
    """Whether its layers can be computed again in the backward pass."""

    def build(self, seed: int) -> nn.Module:
        """The model in its initial values. A Llama's are random: `tputrain.models.hf_llama` gives it
        the weights at its `path`.
        """
        raise NotImplementedError

    def build_empty(self, seed: int = 0) -> nn.Module:
        """The model, its parameters allocated on the current default device, with any values."""
        return self.build(seed)

    def build_for(self, checkpoint: Path, seed: int) -> nn.Module:
        """The model for the weights of `checkpoint`. The directory that `model.path` names may be gone by
        then.
        """
        return self.build_empty(seed)

    def limits(self) -> Limits:
        """Those that the configuration says."""
        return None, None

    def limits_there(self) -> Limits:
        """Those that the directory at `path` says, which is read."""
        return self.limits()

    @property
    def recomputes(self) -> str | None:
        """The kind of activation checkpointing that it asks for, or kinds (none: off); None: nothing said."""
        return None

    def recomputing(self, kind: str) -> Self:
        """With another kind of activation checkpointing."""
        return self

    @property
    def described(self) -> str:
        """Its name for people."""
        return self.name

    @property
    def local_path(self) -> str | None:
        """A directory on this machine that the model begins with."""
        return None

    @property
    def weights_path(self) -> str | None:
        """Where the weights are that `tputrain.models.hf_llama` gives it."""
        return None

    @property
    def is_trained(self) -> bool:
        """Whether it begins with weights that have learned something, as far as is known."""
        return False

    def is_built_whole(self, goes_on: bool) -> bool:
        """Whether it has values as soon as it is made, so that no rank can make its part alone. `goes_on`:
        a checkpoint gives it other ones.
        """
        return False


@dataclass(frozen=True)
class LanguageModelConfig(ModelConfig):
    """What the language models share."""

    path: str | None = None
    """A directory or a run whose weights to begin with; for huggingface also a name on the hub. None: random
    ones."""
    init: str = "weights"
    """weights (those at `path`) or random."""
    activation_checkpointing: Any = None
    """true or layers: the backward pass computes each layer again; products: all of it but its products with
    parameters; offload: as layers, and the host of a TPU keeps their inputs. [layers, none]: kinds of layer
    after layer, which repeat."""

    can_recompute: ClassVar[bool] = True

    def __post_init__(self) -> None:
        expect_choice("model.init", self.init, INITS)
        object.__setattr__(self, "activation_checkpointing", read_setting(self.activation_checkpointing))

    @property
    def recomputes(self) -> str | None:
        return rung_of(self.activation_checkpointing)

    def recomputing(self, kind: str) -> Self:
        return replace(self, activation_checkpointing=SETTINGS.get(kind, kind))


@dataclass(frozen=True)
class LlamaModelConfig(LanguageModelConfig, names=LLAMA_CONFIGS):
    """A Llama; a size that is not None replaces what the name stands for."""

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.resolve()

    def resolve(self) -> LlamaConfig:
        """The full shape. Raises UserError where the fields do not fit each other."""
        return replace(LLAMA_CONFIGS[self.name], **_sizes(self))

    def build(self, seed: int) -> Llama:
        model = self.build_empty()
        initialize(model, seed)
        return model

    def build_empty(self, seed: int = 0) -> Llama:
        return Llama(self.resolve())

    def limits(self) -> Limits:
        shape = self.resolve()
        return shape.max_position_embeddings, shape.vocab_size

    @property
    def described(self) -> str:
        return self.path or _described(self)

    @property
    def local_path(self) -> str | None:
        return self.path

    @property
    def weights_path(self) -> str | None:
        return self.path if self.init == "weights" else None

    @property
    def is_trained(self) -> bool:
        return self.weights_path is not None


@dataclass(frozen=True)
class VitModelConfig(ModelConfig, names=VIT_CONFIGS):
    """A vision transformer; a size that is not None replaces what the name stands for."""

    name: str = "vit-digits"
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_hidden_layers: int | None = None
    num_attention_heads: int | None = None

    reads_text: ClassVar[bool | None] = False

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> VitConfig:
        """The full shape. Raises UserError where the fields do not fit each other."""
        return replace(VIT_CONFIGS[self.name], **_sizes(self))

    @property
    def described(self) -> str:
        return _described(self)

    def build(self, seed: int) -> Vit:
        model = self.build_empty()
        initialize(model, seed)
        return model

    def build_empty(self, seed: int = 0) -> Vit:
        return Vit(self.resolve())


@dataclass(frozen=True)
class HuggingFaceModelConfig(LanguageModelConfig, names=("huggingface",)):
    """Any causal language model of `transformers`."""

    name: str = "huggingface"
    config: dict[str, Any] = field(default_factory=dict)
    """Without `path`: model_type and that type's own settings; its weights are random."""

    is_transformers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def build(self, seed: int) -> nn.Module:
        recomputes = self.activation_checkpointing or False
        if self.path is None:
            return build_huggingface(self.config, seed, recomputes)
        return load_huggingface(self.path, self.init, seed, recomputes)

    def build_empty(self, seed: int = 0) -> nn.Module:
        return (self if self.path is None else replace(self, init="random")).build(seed)

    def build_for(self, checkpoint: Path, seed: int) -> nn.Module:
        return replace(self, path=str(checkpoint), config={}, init="random").build(seed)

    def limits(self) -> Limits:
        return limits_said(self.config)

    def limits_there(self) -> Limits:
        return self.limits() if self.path is None else limits(self.path)

    @property
    def described(self) -> str:
        return self.path or str(self.config.get("model_type", self.name))

    @property
    def local_path(self) -> str | None:
        return self.path if self.path is not None and is_path(self.path) else None

    @property
    def is_trained(self) -> bool:
        return self.path is not None and self.init == "weights"

    def is_built_whole(self, goes_on: bool) -> bool:
        return not goes_on


@dataclass(frozen=True)
class ImportedModelConfig(ModelConfig, names=("import",)):
    """A model that the user's own code makes."""

    name: str = "import"
    path: str | None = None
    """package.module:function"""

    reads_text: ClassVar[bool | None] = None
    runs_code: ClassVar[bool] = True

    def __post_init__(self) -> None:
        expect(bool(self.path), "model.path", self.path, "package.module:function with model.name=import")

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return import_model(str(self.path))

    @property
    def described(self) -> str:
        return str(self.path)

    @property
    def is_trained(self) -> bool:
        return True

    def is_built_whole(self, goes_on: bool) -> bool:
        return True


def _described(cfg: LlamaModelConfig | VitModelConfig) -> str:
    """Its name, and what is not as the name says."""
    shape = (LLAMA_CONFIGS | VIT_CONFIGS)[cfg.name]
    sizes = {key: value for key, value in _sizes(cfg).items() if key != "activation_checkpointing"}
    changed = [f"{key}={value}" for key, value in sizes.items() if value != getattr(shape, key)]
    return f"{cfg.name} with {', '.join(changed)}" if changed else cfg.name


def _sizes(cfg: LlamaModelConfig | VitModelConfig) -> dict[str, Any]:
    """The settings that replace those of the name."""
    shape = (LLAMA_CONFIGS | VIT_CONFIGS)[cfg.name]
    of_shape = {entry.name for entry in fields(shape)}
    return {key: value for key, value in asdict(cfg).items() if key in of_shape and value is not None}
