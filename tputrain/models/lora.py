"""LoRA (Hu et al., 2021): frozen linear layers, each with a trainable product of two narrow matrices.

A layer keeps its name and its weight, so that weights from elsewhere load as ever. A checkpoint's
model.safetensors holds the sum of both, which any reader of the plain model can use.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tputrain.checkpoint.rows import around, gathered, is_distributed, own_part
from tputrain.config_checks import Settings, expect, expect_above, expect_at_least
from tputrain.models.init import std_in_lora, write_initial_value
from tputrain.optim.groups import expect_match, matches


@dataclass(frozen=True)
class LoraConfig(Settings):
    """Which layers get a trainable product of rank `rank`; everything else is frozen."""

    rank: int = 0
    """The narrow matrices' width; 0: no LoRA."""
    alpha: float = 16.0
    """The product counts alpha / rank times."""
    match: list[str] = field(default_factory=lambda: ["*_proj"])
    """Patterns of the names of linear layers, such as `*.q_proj`."""

    def __post_init__(self) -> None:
        expect_at_least("lora.rank", self.rank, 0)
        expect_above("lora.alpha", self.alpha, 0.0)
        expect(bool(self.match), "lora.match", self.match, "at least one pattern, such as *.q_proj")


class LoraLinear(nn.Linear):
    """`x W^T + bias + scale x A^T B^T`: A (rank, in), B (out, rank); W (out, in) and bias are `linear`'s."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float):
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = scale
        self.lora_a = nn.Parameter(linear.weight.new_zeros(rank, linear.in_features))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale

    def merged_weight(self) -> Tensor:
        """The weight of the plain layer that computes the same, in the weight's dtype: on the host or, if
        ranks have parts of it, as parts on their devices.
        """
        weight, a, b = (tensor.detach() for tensor in (self.weight, self.lora_a, self.lora_b))
        if not is_distributed(weight):
            return self._merged(weight.cpu(), a.cpu(), b.cpu())
        own, (rows, columns) = own_part(weight)
        return around(self._merged(own, gathered(a)[:, columns], gathered(b)[rows]), weight)

    def _merged(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (weight.float() + self.scale * (b.float() @ a.float())).to(weight.dtype)


@torch.no_grad()
def add_lora(model: nn.Module, cfg: LoraConfig, seed: int) -> None:
    """Freeze `model` and give the linear layers that match a trainable product, which begins as zero.

    A's values depend only on (seed, the layer's name), as all initial values do. Raises UserError for a
    pattern that matches no linear layer.
    """
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for pattern in cfg.match:
        expect_match("lora.match", pattern, list(linear))
    names = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    model.requires_grad_(False)
    for name, module in linear.items():
        if matches(name, cfg.match):
            is_shared = names.count(id(module.weight)) > 1
            expect(not is_shared, "lora.match", name, "a layer whose weight is not tied to another's")
            replacement = LoraLinear(module, cfg.rank, cfg.alpha / cfg.rank)
            model.set_submodule(name, replacement)
    initialize_lora(model, seed)


@torch.no_grad()
def initialize_lora(model: nn.Module, seed: int) -> None:
    """Write the initial values of what `add_lora` has added, where it has memory; a rank makes its part."""
    for name, layer in lora_layers(model):
        for own, parameter in (("lora_a", layer.lora_a), ("lora_b", layer.lora_b)):
            if not parameter.is_meta:
                write_initial_value(parameter, seed, f"{name}.{own}", std_in_lora(f"{name}.{own}", parameter))


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """Make every LoRA layer of `model` the plain layer that computes the same."""
    for name, layer in list(lora_layers(model)):
        plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        plain.weight, plain.bias = layer.weight, layer.bias
        plain.weight.copy_(layer.merged_weight())
        model.set_submodule(name, plain)


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """The LoRA layers of `model`, by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            yield name, module


def save_adapter(model: nn.Module, base: str, directory: Path | str) -> None:
    """Write only the trained products, as the `peft` library reads them, into an existing directory.

    `base`: where the frozen model is to be had, a directory or a name.
    """
    layers = dict(lora_layers(model))
    expect(bool(layers), "model", type(model).__name__, "a model with LoRA layers (add_lora)")
    tensors: dict[str, Tensor] = {}
    for name, layer in layers.items():
        for letter, tensor in (("A", layer.lora_a), ("B", layer.lora_b)):
            tensors[f"base_model.model.{name}.lora_{letter}.weight"] = tensor.detach().cpu().contiguous()
    first = next(iter(layers.values()))
    rank = first.lora_a.shape[0]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(layers),
        "inference_mode": True,
    }
    directory = Path(directory)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
