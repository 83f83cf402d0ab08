"""Chains of views that take XLA:CPU exponential time are found, and compiled without its fusion emitters."""

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.choices import Choices
from tpu_backend.runtime import compiler, compiler_options
from tpu_backend.runtime.index_chains import _merges, longest_chain
from tputrain.models.llama import Llama, LlamaConfig
from tputrain.models.vit import Vit, VitConfig

N = 16
INDEX = torch.arange(N * N).reshape(N, N).mul(7) % N


def turned(x: Tensor, other: Tensor) -> Tensor:
    return torch.cat([x.t()[1:, :].reshape(-1), other[0]]).view(N, N)


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "turn": turned,
    "transpose": lambda x, other: x.t().contiguous(),
    "fold": lambda x, other: x.reshape(8, 2 * N).t().reshape(N, N),
    "roll": lambda x, other: x.roll(3),
    "roll rows": lambda x, other: x.roll(1, 1),
    "flip": lambda x, other: x.flip(1),
    "pad": lambda x, other: F.pad(x, (1, 0, 1, 0))[:N, :N],
    "shift": lambda x, other: torch.cat([x[:, 1:], other[:, :1]], 1),
    "stencil": lambda x, other: torch.cat([x[:1], x[1:] + x[:-1]]),
    "interleave": lambda x, other: torch.stack([x[:, :8], x[:, 8:]], 2).reshape(N, N),
    "gather": lambda x, other: x.gather(1, INDEX.to(x.device)),
    "cumsum": lambda x, other: x.cumsum(1) * 0.1,
    "where": lambda x, other: torch.where(x > other, x.t(), other),
    "put": lambda x, other: x.index_put((INDEX[0].to(x.device),), other),
    "scan": lambda x, other: (x * other[:1] + other[:, :1]).tanh(),
    "window": lambda x, other: x.reshape(-1).unfold(0, N, N - 1)[:N].contiguous(),
    "product": lambda x, other: (x @ other) * 0.1,
}


def chained(steps: tuple[str, ...], count: int, x: Tensor, other: Tensor) -> Tensor:
    for turn in range(count):
        x = STEPS[steps[turn % len(steps)]](x, other)
    return x


def seconds_to_compile(steps: tuple[str, ...], count: int) -> float:
    """Of the processor, in all threads: what else runs on the machine counts little."""
    x, other = (torch.randn(N, N, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with torch.tpu.eager_mode("fused"):
        on_device = chained(steps, count, x.to("tpu"), other.to("tpu"))
        began = time.process_time()
        torch.tpu.flush()
        took = time.process_time() - began
    torch.testing.assert_close(on_device.cpu(), chained(steps, count, x, other), rtol=1e-4, atol=1e-5)
    return took


def grows_slowly(steps: tuple[str, ...]) -> None:
    """Twice the operations: at most five times the time, where it is any to speak of."""
    before = seconds_to_compile(steps, 6)
    for count in (12, 24):
        took = seconds_to_compile(steps, count)
        assert took < 5 * max(before, 0.4), f"{count} of {steps}: {took:.1f} s, and {before:.1f} s for half"
        before = took


@pytest.mark.parametrize("steps", [("turn",), ("fold", "shift"), ("turn", "roll", "stencil")])
def test_a_chain_of_views_compiles_in_time_that_grows_with_its_length(steps):
    grows_slowly(steps)


def test_an_xla_that_has_no_other_emitters_compiles_chains_without_fusions(monkeypatch):
    monkeypatch.setattr(compiler_options, "_has_other_emitters", lambda: False)
    grows_slowly(("turn", "flip"))


@pytest.mark.sweep
@pytest.mark.parametrize("code", range(200))
def test_small_programs_compile_in_time_that_grows_with_their_length(code):
    choices = Choices(code * 7919 + 13)
    grows_slowly(tuple(choices.among(list(STEPS)) for _ in range(1 + choices.below(3))))


@pytest.mark.parametrize(
    ("before", "after", "merges"),
    [
        ((16, 16), (256,), True),
        ((256,), (16, 16), False),
        ((15, 16), (16, 15), True),
        ((4, 1, 5), (4, 5, 1), False),
        ((2, 3, 4), (2, 12), True),
        ((2, 12), (2, 3, 4), False),
        ((1, 1), (), False),
        ((0, 3), (0,), False),
    ],
)
def test_a_reshape_that_merges_dims(before, after, merges):
    assert _merges(before, after) is merges


# ---- ordinary training steps -------------------------------------------------------------------------------

LLAMA = LlamaConfig(61, 32, 64, 8, 4, 2, 8, 32)
VIT = VitConfig(8, 2, 3, 5, 32, 64, 8, 4)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(8)]
        self.embedding, self.layers, self.head = (
            nn.Embedding(61, 32),
            nn.Sequential(*layers),
            nn.Linear(32, 61),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def convolutions() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Conv2d(3 if not i else 8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        for i in range(8)
    ]
    return nn.Sequential(*blocks, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 5))


def perceptron() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(8)))


TOKENS = torch.arange(24).reshape(2, 12) % 61
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "Llama": (lambda: Llama(LLAMA), TOKENS),
    "ViT": (lambda: Vit(VIT), torch.randn(2, 3, 8, 8)),
    "GPT": (Gpt, TOKENS),
    "MLP": (perceptron, torch.randn(4, 16)),
    "CNN": (convolutions, torch.randn(2, 3, 8, 8)),
    "LSTM": (Recurrent, torch.randn(2, 10, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_ordinary_training_step_keeps_the_emitters(name, monkeypatch):
    lower, chains = compiler.lower_segment, []

    def look(*arguments):
        chains.append(longest_chain(lower(*arguments)[0]))
        raise RuntimeError("looked at")  # and not compiled, which takes long

    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, batch = make().to("tpu"), batch.to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.tpu.synchronize()
    monkeypatch.setattr(compiler, "lower_segment", look)
    with torch.tpu.eager_mode("fused"):
        result = model(batch)
        (result if isinstance(result, Tensor) else result[0]).square().mean().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="looked at"):
            torch.tpu.synchronize()
    assert chains
    assert max(chains) <= compiler_options._LONG_CHAIN // 2
