"""Llama (Touvron et al. 2023; Llama 3: Dubey et al. 2024): a decoder of RMSNorm, rotary attention and SwiGLU.

Parameters carry Hugging Face's names, so a checkpoint is a directory that `transformers` reads. Shapes in
comments: B sequences of S tokens, H query heads in K groups of G = H / K, head size D, vocabulary V.

Written for a device that compiles: shapes never depend on data, nothing is read back, every layer runs the
same operations, and what all layers share (rotation angles, attention mask) is computed once a pass.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain.errors import UserError
from tputrain.models.attention import attend, causal_mask
from tputrain.models.kv_cache import KeyValueCache, LayerCache
from tputrain.models.recompute import NONE, Setting, kinds_of, recomputed
from tputrain.models.sequence import places
from tputrain.models.vocabulary_loss import VocabularyHead, loss_of_head, next_token_loss, vocabulary_loss


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretch of the slow rotations, by which a model trained on short text reads longer text."""

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama, in Hugging Face's words."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    bos_token_id: int = 0
    eos_token_id: int = 0
    activation_checkpointing: Setting = False
    """Keep only each layer's input for the backward pass and compute it again: less memory, more time. Or the
    kinds of layer after layer, which repeat: [layers, none]."""

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)}: expected at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"model.num_attention_heads={self.num_attention_heads} is no multiple of "
                f"model.num_key_value_heads={self.num_key_value_heads}: each key head serves as many queries"
            )
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.hidden_size={self.hidden_size} is no multiple of "
                f"model.num_attention_heads={self.num_attention_heads}: Hugging Face loads no such checkpoint"
            )
        if self.head_dim % 2:
            raise UserError(
                f"model.head_dim={self.head_dim}: expected an even number (it is rotated in pairs)"
            )
        kinds_of(self.activation_checkpointing, self.num_hidden_layers)


# What the Llama 3 models below share.
_LLAMA_3 = partial(
    LlamaConfig,
    vocab_size=128_256,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
    rope_theta=500_000.0,
    bos_token_id=128_000,
    eos_token_id=128_001,
)

LLAMA_CONFIGS: dict[str, LlamaConfig] = {
    "llama-5m": LlamaConfig(4096, 256, 704, 4, 4, 2, 64, 1024, tie_word_embeddings=False),
    "llama-20m": LlamaConfig(8192, 384, 1152, 10, 6, 2, 64, 1024),
    "llama-100m": LlamaConfig(32_000, 768, 2048, 12, 12, 4, 64, 2048),
    "llama-300m": LlamaConfig(32_000, 1024, 2560, 24, 16, 8, 64, 2048),
    "llama-1b": _LLAMA_3(  # Llama-3.2-1B
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        head_dim=64,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama-3b": _LLAMA_3(  # Llama-3.2-3B
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        head_dim=128,
        rope_scaling=RopeScaling(factor=32.0),
    ),
    "llama-8b": _LLAMA_3(  # Llama-3.1-8B
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        head_dim=128,
        rope_scaling=RopeScaling(factor=8.0),
        tie_word_embeddings=False,
    ),
    "llama-70b": _LLAMA_3(  # Llama-3.1-70B
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        head_dim=128,
        rope_scaling=RopeScaling(factor=8.0),
        tie_word_embeddings=False,
    ),
    "llama-405b": _LLAMA_3(  # Llama-3.1-405B
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        head_dim=128,
        rope_scaling=RopeScaling(factor=8.0),
        tie_word_embeddings=False,
    ),
}


class Llama(nn.Module):
    """The language model: token ids in, logits out, or the loss where labels are given."""

    gives_logits_with_loss = False
    """Where labels are given: {"loss", "logits"} instead of the loss alone, for metrics."""
    takes_parts = True
    """Of a sequence: plans may divide it among context ranks. Tokens meet in attention alone."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        # Tied embeddings are one parameter used twice, not two names for it: nothing to keep tied later.
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = VocabularyHead(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Logits (B, S, V), or, with labels, the float32 mean cross-entropy (nats) over those that are not
        -100.

        All arguments are int64 (B, S). `labels` are the next tokens (nothing is shifted here),
        `position_ids` count from 0 in each document (default: in each sequence), and a token attends only
        to earlier ones with its own `document_ids` (default: to all earlier ones).

        With a `cache` the tokens go on from those that it holds; `position_ids` are given and alike in all
        sequences.
        """
        hidden = self.model(input_ids, position_ids, document_ids, cache)
        if labels is not None and not self.gives_logits_with_loss:
            if self.lm_head is None:
                return vocabulary_loss(hidden, self.output_weight, labels)
            if (loss := loss_of_head(self.lm_head, hidden, labels)) is not None:
                return loss
        logits = F.linear(hidden, self.output_weight) if self.lm_head is None else self.lm_head(hidden)
        if labels is None:
            return logits
        loss = next_token_loss(logits, labels)
        return {"loss": loss, "logits": logits} if self.gives_logits_with_loss else loss

    def new_cache(self, length: int) -> KeyValueCache:
        """What text of up to `length` tokens is written with, a token at a time."""
        return KeyValueCache(length, self.config.num_hidden_layers)

    @property
    def tp_plan(self) -> dict[str, str]:
        """How tensor parallelism cuts the modules, by patterns of their names (parallel.tensor)."""
        layers = {
            **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
            **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
            **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
        }
        plan = {f"model.layers.*.{name}": style for name, style in layers.items()}
        if self.lm_head is not None:
            plan |= {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
        return plan

    @property
    def output_weight(self) -> Tensor:
        """The (V, hidden) matrix that turns the last hidden state into logits."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def initial_std(self, name: str) -> float | None:
        """The standard deviation that parameter `name` starts from; None: it starts as ones (norms).

        Normal(0, 0.02); for the two matrices of a layer that write to the residual stream less by sqrt(2 *
        layers), so that the stream's variance does not grow with depth (GPT-2, Radford et al. 2019). An
        embedding that is not the output matrix as well starts at 1: the first norm scales it there anyway,
        and it then bears a three times higher learning rate. A tied one cannot, its first logits would be
        far too large.
        """
        if name == "model.embed_tokens.weight" and not self.config.tie_word_embeddings:
            return 1.0
        if name.endswith("norm.weight"):
            return None
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            return 0.02 / math.sqrt(2 * self.config.num_hidden_layers)
        return 0.02

    def save_config(self, directory: Path | str) -> None:
        """Write Hugging Face's config.json and generation_config.json into an existing directory."""
        ids = {"bos_token_id": self.config.bos_token_id, "eos_token_id": self.config.eos_token_id}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.config.vocab_size,
            "hidden_size": self.config.hidden_size,
            "intermediate_size": self.config.intermediate_size,
            "num_hidden_layers": self.config.num_hidden_layers,
            "num_attention_heads": self.config.num_attention_heads,
            "num_key_value_heads": self.config.num_key_value_heads,
            "head_dim": self.config.head_dim,
            "max_position_embeddings": self.config.max_position_embeddings,
            "rope_theta": self.config.rope_theta,
            "rope_scaling": _rope_scaling_json(self.config.rope_scaling),
            "rms_norm_eps": self.config.rms_norm_eps,
            "tie_word_embeddings": self.config.tie_word_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "torch_dtype": str(self.output_weight.dtype).removeprefix("torch."),
            **ids,
        }
        directory = Path(directory)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (directory / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


class Decoder(nn.Module):
    """Embedding, the layers, and the last norm."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kinds = kinds_of(config.activation_checkpointing, config.num_hidden_layers)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in kinds)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids)
        own, every = places(input_ids.shape[1], input_ids.device)
        if cache is not None:
            assert position_ids is not None, "a cache needs to know where the tokens are"
            own, every = position_ids[0], cache.places(input_ids.device)
        rotation = self.rotary(own[None] if position_ids is None else position_ids, hidden.dtype)
        mask = causal_mask(own, every, document_ids)
        for number, layer in enumerate(self.layers):
            if cache is not None:
                hidden = layer(hidden, rotation, mask, (cache.layers[number], own))
            else:
                kind: Any = layer.recomputes
                hidden = recomputed(layer, hidden, rotation, mask, kind=kind)
        return self.norm(hidden)


class Layer(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and added to the stream."""

    def __init__(self, config: LlamaConfig, recomputes: str = NONE):
        super().__init__()
        self.recomputes = recomputes
        """What the backward pass computes again (see `recompute`)."""
        self.self_attn = Attention(config)
        self.mlp = SwiGLU(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        held: tuple[LayerCache, Tensor] | None = None,
    ) -> Tensor:
        """`held`: what there is of the tokens before, and the places of these."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, mask, held)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023) with rotated queries and keys."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.head_dim = config.head_dim
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = _linear(config.hidden_size, query_size)
        self.k_proj = _linear(config.hidden_size, key_size)
        self.v_proj = _linear(config.hidden_size, key_size)
        self.o_proj = _linear(query_size, config.hidden_size)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None,
        held: tuple[LayerCache, Tensor] | None = None,
    ) -> Tensor:
        B, S, _ = hidden.shape
        D = self.head_dim
        # H and K are what a rank has: with tensor parallelism a part of the model's.
        query = self.q_proj(hidden).view(B, S, -1, D).transpose(1, 2)  # (B, H, S, D)
        key = self.k_proj(hidden).view(B, S, -1, D).transpose(1, 2)  # (B, K, S, D)
        value = self.v_proj(hidden).view(B, S, -1, D).transpose(1, 2)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if held is not None:  # (B, K, T, D): as many as the cache has room for
            cache, own = held
            key, value = cache.extended(own, key, value)
        mixed = attend(query, key, value, mask)  # (B, H, S, D)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, S, -1))


class SwiGLU(nn.Module):
    """The gated feed-forward network (Shazeer 2020)."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.gate_proj = _linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class RMSNorm(nn.Module):
    """Scale to unit root mean square (Zhang and Sennrich 2019), in float32 whatever the input is."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021): the cosine and sine of each position's angles."""

    inverse_frequencies: Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self._frequencies = inverse_frequencies(config)
        self.register_buffer("inverse_frequencies", torch.tensor(self._frequencies), persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # Casting the model to bfloat16 must not round the frequencies (far positions would turn to noise),
        # and `to_empty` leaves a buffer that no checkpoint fills: so the table is made anew wherever the
        # module goes.
        super()._apply(fn, recurse)
        device = self.inverse_frequencies.device
        self.inverse_frequencies = torch.tensor(self._frequencies, dtype=torch.float32, device=device)
        return self

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (B or 1, 1, S, D), of int64 positions (B or 1, S). The sines of the first half
        are negative, as `rotate` wants them.
        """
        angles = position_ids[:, None, :, None].float() * self.inverse_frequencies  # (B, 1, S, D / 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (x[i], x[i + D/2]) of (B, heads, S, D): Hugging Face's order of the pairs."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def inverse_frequencies(config: LlamaConfig) -> list[float]:
    """Radians a position, for each of D/2 pairs: theta^(-2i/D), stretched as `rope_scaling` says.

    Scaling as in Llama 3.1: waves longer than the original context / low_freq_factor are divided by
    `factor`, those shorter than the context / high_freq_factor stay, and between them the two are blended.
    """
    frequencies = [config.rope_theta ** (-pair / config.head_dim) for pair in range(0, config.head_dim, 2)]
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies

    def stretched(frequency: float) -> float:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        kept = min(1.0, max(0.0, kept))
        return kept * frequency + (1 - kept) * frequency / scaling.factor

    return [stretched(frequency) for frequency in frequencies]


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def _rope_scaling_json(scaling: RopeScaling | None) -> dict[str, float | str] | None:
    return None if scaling is None else {"rope_type": "llama3", **vars(scaling)}
