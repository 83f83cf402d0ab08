"""transformers' models under plain `torch.compile`: no graph break of our own, and eager mode's training."""

import copy
import logging

import pytest
import torch
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
NO_DROPOUT = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2, **NO_DROPOUT}


def make(architecture: str) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"GPT2": GPT2, "Mixtral": SIZES | EXPERTS}.get(architecture, SIZES)
    config = getattr(transformers, f"{architecture}Config")(**sizes)
    head = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{architecture}{head}")(config).train()


def train(model: torch.nn.Module, call, device: str) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the gradients of the last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1)).to(device)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [each.grad.cpu() for each in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["Qwen3", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("Llama", "GPT2", "Mixtral"))],
)
def test_it_trains_as_in_eager_mode_with_no_graph_break_that_stock_pytorch_has_not(architecture, caplog):
    model = make(architecture)
    losses, gradients = train(twin := copy.deepcopy(model), twin, "cpu")
    torch.compile(copy.deepcopy(model), backend="eager")(
        input_ids=(ids := torch.ones(2, 12).long()), labels=ids
    )
    stock = dict(counters["graph_break"])
    torch._dynamo.reset()
    counters.clear()
    with caplog.at_level(logging.WARNING, "tpu_backend.compile"):
        its_losses, its_gradients = train(model.to("tpu"), torch.compile(model), "tpu")
    assert dict(counters["graph_break"]) == stock
    assert not [record.message for record in caplog.records if record.name.startswith("tpu_backend")]
    torch.testing.assert_close(torch.tensor(its_losses), torch.tensor(losses), rtol=1e-4, atol=0)
    for ours, theirs in zip(its_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
