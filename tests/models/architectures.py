"""Tiny configurations of transformers' architectures, from their config classes; no weights are loaded."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers
from torch import Generator, nn
from transformers import PretrainedConfig

from tests.models.batches import (
    CLASSES,
    IMAGE_SIDE,
    VOCABULARY,
    classified_waveform,
    image,
    image_and_text,
    segmented_image,
    text,
    transcribed_spectrogram,
    transcribed_waveform,
    translation,
    unpadded_text,
)
from tests.models.case import Batch, Case, LossOf


@dataclass(frozen=True)
class Architecture:
    """`name` + `head` is the model's class in transformers, `name` + `config` that of its configuration."""

    name: str
    head: str
    family: str
    batch: Callable[[Generator], Batch]
    settings: dict[str, Any] = field(default_factory=dict)
    config: str = "Config"
    options: dict[str, Any] = field(default_factory=dict)  # of the model's call

    def model(self) -> nn.Module:
        config = getattr(transformers, self.name + self.config)(**self.settings)
        without_dropout(config)
        return LossOf(getattr(transformers, self.name + self.head)(config), **self.options)

    def case(self) -> Case:
        return Case(self.name, self.family, self.model, self.batch)


def without_dropout(config: PretrainedConfig) -> None:
    """Set every probability of dropping something to 0, in nested configurations too."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            without_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _causal(name: str, **settings: Any) -> Architecture:
    return Architecture(name, "ForCausalLM", "decoder", text, DECODER | settings)


def _experts(name: str, **settings: Any) -> Architecture:
    return Architecture(name, "ForCausalLM", "mixture of experts", text, DECODER | settings)


def _state_space(name: str, **settings: Any) -> Architecture:
    return Architecture(name, "ForCausalLM", "state space", unpadded_text, settings)


def _encoder(name: str, head: str = "ForMaskedLM", **settings: Any) -> Architecture:
    return Architecture(name, head, "encoder", text, ENCODER | settings)


def _translator(name: str, **settings: Any) -> Architecture:
    return Architecture(name, "ForConditionalGeneration", "encoder-decoder", translation, settings)


def _vision(
    name: str, head: str = "ForImageClassification", batch: Any = image, **settings: Any
) -> Architecture:
    return Architecture(name, head, "vision", batch, {"num_labels": CLASSES} | settings)


DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = DECODER | {"type_vocab_size": 2}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "forced_eos_token_id": None,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}
TRANSFORMER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
PATCHES = TRANSFORMER | {"image_size": IMAGE_SIDE, "patch_size": 8}
STAGES = {"image_size": IMAGE_SIDE, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4}
WAVEFORM = TRANSFORMER | {
    "vocab_size": VOCABULARY,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "num_labels": CLASSES,
    "apply_spec_augment": False,
    "pad_token_id": 0,
    "ctc_zero_infinity": True,
}
TEXT_TOWER = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
    "projection_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
} | TRANSFORMER
TWO_TOWERS = {"text_config": TEXT_TOWER, "vision_config": PATCHES, "projection_dim": 16}

ARCHITECTURES = (
    _causal("Llama"),
    _causal("Qwen2"),
    _causal("Qwen3", head_dim=8),
    _causal("Mistral", sliding_window=4),
    _causal("Gemma", head_dim=8),
    _causal("Gemma2", head_dim=8, sliding_window=4, query_pre_attn_scalar=8),
    Architecture(
        "Gemma3",
        "ForCausalLM",
        "decoder",
        text,
        DECODER | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        config="TextConfig",
    ),
    Architecture("GPT2", "LMHeadModel", "decoder", text, GPT),
    _causal("GPTNeoX"),
    _causal("GPTNeo", num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4),
    Architecture("GPTJ", "ForCausalLM", "decoder", text, GPT | {"rotary_dim": 4}),
    Architecture("GPTBigCode", "ForCausalLM", "decoder", text, GPT),
    _causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    _causal("Phi", partial_rotary_factor=0.5),
    _causal("Phi3"),
    _causal("Falcon", new_decoder_architecture=True, num_kv_heads=2),
    Architecture(
        "Bloom",
        "ForCausalLM",
        "decoder",
        text,
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    Architecture(
        "Mpt",
        "ForCausalLM",
        "decoder",
        text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    ),
    _causal("StableLm"),
    _causal("Olmo"),
    _causal("Olmo2"),
    _causal("Cohere"),
    _causal("SmolLM3"),
    _causal("Granite"),
    _causal("Starcoder2"),
    _experts("Mixtral", num_local_experts=4),
    _experts(
        "Qwen2Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    ),
    _experts("Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8),
    _experts("Olmoe", num_experts=4, num_experts_per_tok=2),
    _experts(
        "DeepseekV3",
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        num_key_value_heads=4,
    ),
    _experts("GptOss", num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
    _encoder("Bert"),
    _encoder("Roberta"),
    _encoder(
        "DebertaV2",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _encoder("Electra", embedding_size=16),
    _encoder("Albert", embedding_size=16, inner_group_num=1),
    _encoder("DistilBert", dim=32, hidden_dim=64, n_layers=2, n_heads=4),
    _encoder("ModernBert", local_attention=4, global_attn_every_n_layers=2, cls_token_id=1, sep_token_id=2),
    _encoder("MPNet"),
    _encoder("FNet"),
    Architecture(
        "XLNet",
        "LMHeadModel",
        "encoder",
        text,
        {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    ),
    _translator("T5", **T5),
    _translator("MT5", **T5, feed_forward_proj="gated-gelu"),
    _translator("Bart", **BART),
    _translator("Pegasus", **BART),
    Architecture("Marian", "MTModel", "encoder-decoder", translation, BART | {"forced_eos_token_id": None}),
    _vision("ViT", **PATCHES),
    _vision("DeiT", **PATCHES),
    _vision("Beit", **PATCHES),
    _vision("Swin", **STAGES, patch_size=4),
    _vision("Swinv2", **STAGES, patch_size=4),
    _vision("ConvNext", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2),
    _vision("ResNet", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"),
    _vision("Dinov2", **PATCHES),
    _vision(
        "Segformer",
        "ForSemanticSegmentation",
        segmented_image,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
    ),
    Architecture("CLIP", "Model", "vision", image_and_text, TWO_TOWERS, options={"return_loss": True}),
    Architecture("Siglip", "Model", "vision", image_and_text, TWO_TOWERS, options={"return_loss": True}),
    Architecture(
        "Whisper",
        "ForConditionalGeneration",
        "speech",
        transcribed_spectrogram,
        BART | {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16},
    ),
    Architecture("Wav2Vec2", "ForCTC", "speech", transcribed_waveform, WAVEFORM),
    Architecture("Hubert", "ForSequenceClassification", "speech", classified_waveform, WAVEFORM),
    Architecture(
        "WavLM",
        "ForSequenceClassification",
        "speech",
        classified_waveform,
        WAVEFORM | {"num_buckets": 16, "max_bucket_distance": 16},
    ),
    _state_space("Mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4),
    _state_space(
        "Mamba2",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
    ),
    _state_space(
        "Rwkv",
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
        context_length=16,
    ),
    _state_space(
        "Jamba",
        **DECODER,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_experts=2,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    _state_space(
        "FalconH1",
        **DECODER,
        head_dim=8,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=2,
        mamba_d_state=4,
        mamba_chunk_size=4,
    ),
    _state_space(
        "Qwen3Next",
        **DECODER,
        head_dim=8,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "full_attention"],
    ),
)
