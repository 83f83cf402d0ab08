"""Whole training steps under the harness: every ATen call of forward, backward, clipping and optimizer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.backend.lowering_harness import CheckLowerings

# What a training step may do without the table: allocate, make views, read a number on the host.
_NOT_LOWERED = {"empty.memory_format", "empty_like", "empty_strided", "_unsafe_view", "_local_scalar_dense"}


class Block(nn.Module):
    """A Llama block, small: RMSNorm, grouped-query attention with rotary embedding, SwiGLU."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (
            part.view(batch, length, -1, self.head_dim).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(sizes, dim=-1)
        )
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-2, -1)) * self.head_dim**-0.5
        attention = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        x = x + self.out(attention.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 1e4 ** (-torch.arange(half) / half))
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TinyLlama(nn.Module):
    def __init__(self, vocab: int = 61, width: int = 16, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(Block(width, 4, 2) for _ in range(layers))
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.embed.weight)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, autocast: bool = False
) -> CheckLowerings:
    checks = CheckLowerings()
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    with checks:
        for _ in range(steps):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=3)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return checks


def assert_served(checks: CheckLowerings) -> None:
    assert checks.failures == []
    assert not checks.declined
    assert set(checks.unserved) <= _NOT_LOWERED


@pytest.mark.parametrize("autocast", [False, True])
def test_llama_step_with_fused_adamw(autocast: bool) -> None:
    torch.manual_seed(0)
    model = TinyLlama()
    checks = train(
        model, torch.optim.AdamW(model.parameters(), fused=True, weight_decay=0.1), autocast=autocast
    )
    assert_served(checks)
    assert checks.checked["_fused_adamw"] == 2


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
        (torch.optim.Adam, {"fused": True, "weight_decay": 0.1}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.9, "nesterov": True}),
        (torch.optim.SGD, {"foreach": False, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9, "dampening": 0.1}),
        (torch.optim.SGD, {"fused": True}),
    ],
)
def test_optimizer_step(optimizer: type[torch.optim.Optimizer], options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(61, 8), nn.Linear(8, 61))
    assert_served(train(model, optimizer(model.parameters(), lr=0.1, **options)))


def test_gpt_parts() -> None:
    """LayerNorm, GELU, learned positions, dropout, SDPA's math form."""
    torch.manual_seed(0)
    norm, linear = nn.LayerNorm(8), nn.Linear(8, 8)
    x = torch.randn(2, 5, 8, requires_grad=True)
    checks = CheckLowerings()
    with checks, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        h = F.gelu(linear(norm(x)), approximate="tanh")
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)
        F.mse_loss(F.dropout(F.gelu(h), 0.5), torch.zeros_like(h)).backward()
    assert_served(checks)


def test_convolutional_net_step() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 5),
    )  # fmt: skip
    images = torch.randn(2, 3, 8, 8)
    checks = CheckLowerings()
    with checks:
        F.cross_entropy(model(images), torch.tensor([1, 4])).backward()
    assert_served(checks)


def test_layer_norm_adds_gradients_of_rows_in_pytorchs_order() -> None:
    values, upstream = torch.randn(100, 7), torch.randn(100, 7)

    def grad_bias(device: str) -> torch.Tensor:
        bias = torch.zeros(7, device=device, requires_grad=True)
        F.layer_norm(values.to(device), (7,), torch.ones(7, device=device), bias).backward(
            upstream.to(device)
        )
        assert bias.grad is not None
        return bias.grad.cpu()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each has a part of the rows
    try:
        assert torch.equal(grad_bias("tpu"), grad_bias("cpu"))
    finally:
        torch.set_num_threads(threads)


def test_a_momentum_of_its_own_in_each_step_compiles_nothing() -> None:
    """`BatchNorm(momentum=None)` averages over all batches so far: its factor is 1, 1/2, 1/3, ..."""
    batches = [torch.randn(6, 3, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    norm = torch.nn.BatchNorm1d(3, momentum=None)
    on_device = torch.nn.BatchNorm1d(3, momentum=None, device="tpu")
    compilations = []
    for batch in batches:
        norm(batch)
        on_device(batch.to("tpu"))
        torch.tpu.synchronize()
        compilations.append(torch.tpu.compile_stats()["compilations"])
    assert compilations[-1] == compilations[2]
    torch.testing.assert_close(on_device.running_mean.cpu(), norm.running_mean)
    torch.testing.assert_close(on_device.running_var.cpu(), norm.running_var)


def test_parameters_of_another_dtype_are_refused_as_on_the_cpu() -> None:
    for device in ("cpu", "tpu"):
        for norm in (torch.nn.LayerNorm(3), torch.nn.BatchNorm1d(3)):
            with pytest.raises(RuntimeError, match="all inputs must share same datatype"):
                norm.to(device)(torch.ones(2, 3, dtype=torch.float64, device=device))


def test_group_norms_statistics_are_of_the_parameters_dtype() -> None:
    def dtypes(device: str) -> list[torch.dtype]:
        narrow, wide = torch.ones(1, 4, 3, device=device).bfloat16(), torch.ones(4, device=device)
        return [each.dtype for each in torch.native_group_norm(narrow, wide, wide, 1, 4, 3, 2, 0)]

    assert dtypes("tpu") == dtypes("cpu")


def test_the_median_of_nothing_is_nan() -> None:
    assert torch.ones(0, device="tpu").median().isnan()


@pytest.mark.parametrize("padding_idx", [-1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_a_16_bit_gradient_of_an_embedding_is_summed_in_float32(padding_idx: int, by_frequency: bool) -> None:
    tokens = torch.tensor([3, 9, 3, 0, 9, 9])
    gradient = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    rest = 50, padding_idx, by_frequency
    found = torch.ops.aten.embedding_dense_backward(gradient.to("tpu"), tokens.to("tpu"), *rest).cpu()
    expected = torch.ops.aten.embedding_dense_backward(gradient.double(), tokens, *rest).bfloat16()
    assert torch.equal(found, expected)
