"""Short runs of models whose sequences may be cut over ranks."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain import (
    CheckpointConfig,
    LogConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
)
from tputrain.batches import IGNORED_LABEL
from tputrain.models import Llama, LlamaConfig, initialize
from tputrain.models.huggingface import build_huggingface

MODELS = ("split-llama", "split-qwen3", "attending")
STEPS = 20
SHAPE = LlamaConfig(
    vocab_size=30,
    hidden_size=12,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=6,
    max_position_embeddings=16,
)


class Attending(nn.Module):
    """A layer of attention by PyTorch's function, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(30, 8), nn.Embedding(8, 8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 30)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        query, key, value = (
            each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(hidden).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(mixed.transpose(1, 2).flatten(-2))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Batches:
    """By step four sequences. Of some steps a rank's part has no labels, or all of the first two."""

    def __init__(self, has_documents: bool):
        self.has_documents = has_documents

    def batch_at(self, step: int, micro: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 30, (4, 9), generator=generator)
        labels = ids[:, 1:].clone()
        if step % 3 == 1:
            labels[:, 2:6] = IGNORED_LABEL
        if step % 3 == 2:
            labels[:2] = IGNORED_LABEL
        batch = {"input_ids": ids[:, :-1], "labels": labels}
        if self.has_documents:  # two a row, of which one goes over the cut
            starts = torch.randint(1, 8, (4, 1), generator=generator)
            batch["document_ids"] = (torch.arange(8) >= starts).long()
        return batch


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "attending":
        return Attending()
    if name == "split-llama":
        initialize(model := Llama(SHAPE), 0)
        return model
    return build_huggingface(
        {
            "model_type": "qwen3",
            "vocab_size": 30,
            "hidden_size": 12,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "use_sliding_window": True,
            "sliding_window": 3,
        }
    )


def train(name: str, run_dir: Path, device: str, **parallel: Any) -> Trainer:
    model = build(name)
    cfg = RunConfig(
        device=device,
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=STEPS, evaluate_every=10, max_grad_norm=0.5, metrics=["accuracy"]),
        optim=OptimConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=5, progress="none"),
        parallel=ParallelConfig(**parallel),
    )
    loader = Batches(has_documents=name != "attending")
    trainer = Trainer(
        model,
        cfg,
        train_loader=loader,
        val_loader=[loader.batch_at(101, 0), loader.batch_at(102, 0)],
        loss_fn=loss_of if name == "attending" else None,
    )
    trainer.fit()
    return trainer
