"""Training gives the same losses in debug, strict and fused, and those of the CPU."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.ways import WAYS, run_as
from tputrain.models import Llama, LlamaConfig, initialize

STEPS = 50


def _mlp_losses(device: str) -> list[float]:
    """A classifier with momentum, clipping and a schedule; a batch of its own each step."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )
    inputs = torch.randn(STEPS, 12, 8)
    labels = (inputs @ torch.randn(8, 4)).argmax(-1)
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs[step].to(device)), labels[step].to(device), label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _llama_losses(device: str) -> list[float]:
    """Two layers, grouped queries, tied embeddings, packed documents, AdamW."""
    model = Llama(LlamaConfig(32, 16, 32, 2, 4, 2, 4, max_position_embeddings=16))
    initialize(model, seed=0)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    documents = (torch.arange(12) >= 7).long().expand(4, 12).to(device)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(0, 32, (4, 1), generator=generator)
        tokens = ((starts + 5 * torch.arange(13)) % 32).to(device)  # each token tells the next
        optimizer.zero_grad()
        loss = model(tokens[:, :-1], tokens[:, 1:], document_ids=documents)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check(losses: Callable[[str], list[float]]) -> None:
    expected = torch.tensor(losses("cpu"))
    assert expected[-5:].mean() < 0.8 * expected[:5].mean(), "the program learns nothing"
    by_way = {}
    for way in WAYS:
        with run_as(way):
            by_way[way] = torch.tensor(losses("tpu"))
        torch.testing.assert_close(
            by_way[way], expected, rtol=1e-4, atol=0, msg=lambda text, way=way: f"{way}: {text}"
        )
    for way in WAYS:
        torch.testing.assert_close(by_way[way], by_way["debug"], rtol=1e-4, atol=0)


def test_an_mlp_trains_alike_in_every_mode_and_on_the_cpu():
    _check(_mlp_losses)


def test_a_llama_trains_alike_in_every_mode_and_on_the_cpu():
    _check(_llama_losses)
