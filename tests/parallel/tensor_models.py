"""Small models with grouped queries, of which two ranks have one group each."""

from dataclasses import replace

import small_run
from torch import nn

from tputrain.models import LoraConfig, add_lora, initialize
from tputrain.models.huggingface import build_huggingface
from tputrain.models.llama import Llama

# 15 rows a tensor rank do not divide by 2: shards of them differ in size.
SHAPE = replace(
    small_run.SHAPE,
    vocab_size=62,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)

SEQUENCE_PLAN = {
    "model.embed_tokens": {"style": "rowwise", "output": "sequence"},
    "*norm": {"style": "sequence", "output": "replicate"},
    "*.[qkv]_proj": "colwise",
    "*.gate_proj": "colwise",
    "*.up_proj": "colwise",
    "*.o_proj": {"style": "rowwise", "output": "sequence"},
    "*.down_proj": {"style": "rowwise", "output": "sequence"},
    "lm_head": "colwise_gather_output",
}


def build(name: str) -> nn.Module:
    if name in ("llama", "llama-products", "lora"):
        kept = {"activation_checkpointing": "products"} if name == "llama-products" else {}
        model = Llama(replace(SHAPE, **kept))
        initialize(model, 0)
        if name == "lora":  # of a width that two ranks do not divide
            add_lora(model, LoraConfig(rank=3, match=["*_proj", "lm_head"]), seed=1)
        return model
    # Norms of queries and keys, which are whole on ranks that have a part of the heads.
    return build_huggingface(
        {
            "model_type": "qwen3",
            "vocab_size": 62,
            "hidden_size": 20,
            "intermediate_size": 30,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 6,
            "tie_word_embeddings": name != "untied-qwen3",
        }
    )
