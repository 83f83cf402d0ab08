"""Models by name: `model = build_model(ModelConfig(name="llama-5m"))`, then `initialize(model, seed)`."""

from tputrain.models.config import ModelConfig, build_model
from tputrain.models.init import initialize
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig

__all__ = ["LLAMA_CONFIGS", "Llama", "LlamaConfig", "ModelConfig", "build_model", "initialize"]
