"""Models by name: `ModelConfig(name="llama-5m").build(seed=0)`."""

from tputrain.models.config import LlamaModelConfig, ModelConfig
from tputrain.models.huggingface import load_huggingface
from tputrain.models.init import initialize
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig
from tputrain.models.lora import LoraConfig, add_lora, merge_lora, save_adapter
from tputrain.models.meta import parameters_on_meta

__all__ = [
    "LLAMA_CONFIGS",
    "Llama",
    "LlamaConfig",
    "LlamaModelConfig",
    "LoraConfig",
    "ModelConfig",
    "add_lora",
    "initialize",
    "load_huggingface",
    "merge_lora",
    "parameters_on_meta",
    "save_adapter",
]
