"""Short runs of transformers' models, one of each type that plans give context ranks."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from context_runs import Batches
from torch import nn

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
from tputrain.models.huggingface import build_huggingface
from tputrain.models.lora import LoraConfig, add_lora

STEPS = 3  # by step other tokens have labels
SIZES = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
WIDTH = {"head_dim": 8}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # where they must be in the vocabulary
WINDOW = {"sliding_window": 3}
CUT = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}

TYPES: dict[str, dict[str, Any]] = {
    "cohere": {**HEADS, **TOKENS},
    "cohere2": {**HEADS, **TOKENS, **CUT},
    "gemma": {**HEADS, **WIDTH, **TOKENS},
    "gemma3_text": {**HEADS, **WIDTH, **CUT},
    "glm4": {**HEADS, **WIDTH, **TOKENS},
    "gpt_neox": {"num_attention_heads": 2},
    "granite": {**HEADS, **TOKENS},
    "granitemoe": {**HEADS, **TOKENS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "helium": {**HEADS, **WIDTH, **TOKENS},
    "llama": HEADS,
    "ministral": {**HEADS, **WIDTH, **CUT},
    "ministral3": {**HEADS, **WIDTH},
    "mistral": {**HEADS, **WINDOW},
    "mixtral": {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {**HEADS, **TOKENS},
    "olmo3": {**HEADS, **TOKENS, **CUT},
    "olmo": {**HEADS, **TOKENS},
    "olmoe": {**HEADS, **EXPERTS, **TOKENS},
    "persimmon": {"num_attention_heads": 2, **TOKENS},
    "phi": HEADS,
    "phi3": {**HEADS, **TOKENS, **WINDOW},
    "qwen2": {**HEADS, "use_sliding_window": True, **CUT},
    "qwen2_moe": {**HEADS, **EXPERTS, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8},
    "qwen3": {**HEADS, **WIDTH, "use_sliding_window": True, **CUT},
    "qwen3_moe": {**HEADS, **EXPERTS, "moe_intermediate_size": 8},
    "seed_oss": {**HEADS, **WIDTH, **TOKENS, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {**HEADS, **TOKENS, "num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "stablelm": {**HEADS, **TOKENS},
    "starcoder2": {**HEADS, **TOKENS, **WINDOW},
}
LORA = "llama with LoRA"
NAMES = (*TYPES, LORA)


def build(name: str) -> nn.Module:
    kind = "llama" if name == LORA else name
    model = build_huggingface({"model_type": kind, "num_hidden_layers": 1, **SIZES, **TYPES[kind]})
    # With weights of a first step, 0.02 and less, attention would hardly count.
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    if name == LORA:
        add_lora(model, LoraConfig(rank=2), 0)
    return model


def train(name: str, run_dir: Path, device: str, context: int) -> None:
    cfg = RunConfig(
        device=device,
        run_dir=str(run_dir),
        trainer=TrainerConfig(steps=STEPS),
        optim=OptimConfig(learning_rate=3e-3),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=1, progress="none"),
        parallel=ParallelConfig(context=context),
    )
    trainer = Trainer(build(name), cfg, train_loader=Batches(has_documents=True))
    trainer.fit()
    assert trainer.world.context_size == context


def train_all() -> None:
    """What a rank of the launch does."""
    runs = Path(os.environ["RUNS"])
    torch.tpu.set_executable_cache(runs / "programs")
    for name in NAMES:
        train(name, runs / name, "tpu", 2)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
