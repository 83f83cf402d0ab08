"""Choosing a model by name, with changes, from a configuration file."""

from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches

from tputrain.errors import UserError
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig


@dataclass(frozen=True)
class ModelConfig:
    """A model by name; every other field, where it is not None, replaces what the name stands for."""

    name: str = "llama-5m"
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
        self.resolve()

    def resolve(self) -> LlamaConfig:
        """The full shape. Raises UserError where the name is unknown or the fields do not fit each other."""
        if self.name not in LLAMA_CONFIGS:
            nearest = get_close_matches(self.name, LLAMA_CONFIGS, n=1, cutoff=0.0)[0]
            known = ", ".join(LLAMA_CONFIGS)
            raise UserError(
                f"model.name={self.name}: no such model, did you mean {nearest}? (known: {known})"
            )
        changes = {key: value for key, value in asdict(self).items() if key != "name" and value is not None}
        return replace(LLAMA_CONFIGS[self.name], **changes)


def build_model(cfg: ModelConfig) -> Llama:
    """The model with parameters allocated (on the current default device) but not in their initial values.

    `tputrain.models.initialize(model, seed)` gives those.
    """
    return Llama(cfg.resolve())
