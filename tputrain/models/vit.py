"""A vision transformer (Dosovitskiy et al. 2021): patches of an image as the tokens of a plain encoder.

Without a class token: what the head sees is the mean over the patches (Beyer et al. 2022). Shapes in
comments: B images of C channels and N patches of P x P, H heads, width E.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain.batches import IGNORED_LABEL
from tputrain.errors import UserError


@dataclass(frozen=True)
class VitConfig:
    """The shape of a vision transformer, in Hugging Face's words."""

    image_size: int
    """Height and width in pixels."""
    patch_size: int
    num_channels: int
    num_classes: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise UserError(f"model.{name}={getattr(self, name)}: expected at least 1")
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"model.hidden_size={self.hidden_size}: expected a multiple of "
                f"model.num_attention_heads={self.num_attention_heads}"
            )


VIT_CONFIGS: dict[str, VitConfig] = {
    "vit-digits": VitConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_classes=10,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
    ),
}


class Vit(nn.Module):
    """The classifier: images in, logits out, or the loss where labels are given."""

    gives_logits_with_loss = False
    """Where labels are given: {"loss", "logits"} instead of the loss alone, for metrics."""

    def __init__(self, config: VitConfig):
        super().__init__()
        self.config = config
        patch = config.num_channels * config.patch_size**2
        self.embed = nn.Linear(patch, config.hidden_size, bias=False)
        num_patches = (config.image_size // config.patch_size) ** 2
        self.positions = nn.Parameter(torch.zeros(num_patches, config.hidden_size))
        self.layers = nn.ModuleList(VitLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.head = nn.Linear(config.hidden_size, config.num_classes, bias=False)

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Logits (B, classes) of float images (B, C, height, width); or, with int64 labels (B,), the float32
        mean cross-entropy (nats) over those that are not -100.
        """
        hidden = self.embed(self.patches(pixel_values.to(self.head.weight.dtype))) + self.positions
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden).mean(dim=1))
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL)
        return {"loss": loss, "logits": logits} if self.gives_logits_with_loss else loss

    def patches(self, images: Tensor) -> Tensor:
        """(B, N, C * P * P), row by row."""
        B, C = images.shape[:2]
        P, rows = self.config.patch_size, self.config.image_size // self.config.patch_size
        cut = images.view(B, C, rows, P, rows, P).permute(0, 2, 4, 1, 3, 5)
        return cut.reshape(B, rows * rows, C * P * P)

    def initial_std(self, name: str) -> float | None:
        """The standard deviation that parameter `name` starts from; None: it starts as ones (norms).

        That of a matrix keeps the variance of what it is given; those that write to the residual stream are
        smaller by sqrt(2 * layers), so that the stream's variance does not grow with depth.
        """
        if "norm" in name:
            return None
        if name == "positions":
            return 0.02
        if name == "embed.weight":
            return self.embed.in_features**-0.5
        if name.endswith("down.weight"):
            return (2 * self.config.num_hidden_layers * self.config.intermediate_size) ** -0.5
        std = self.config.hidden_size**-0.5
        return std / math.sqrt(2 * self.config.num_hidden_layers) if name.endswith("out.weight") else std


class VitLayer(nn.Module):
    """Attention, then the feed-forward network, each behind a norm and added to the stream."""

    def __init__(self, config: VitConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.attention_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.feed_forward_norm = nn.LayerNorm(config.hidden_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.down(F.gelu(self.up(self.feed_forward_norm(hidden))))

    def attention(self, hidden: Tensor) -> Tensor:
        B, N, E = hidden.shape
        query, key, value = self.qkv(hidden).view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)  # (B, H, N, E / H)
        return self.out(mixed.transpose(1, 2).reshape(B, N, E))
