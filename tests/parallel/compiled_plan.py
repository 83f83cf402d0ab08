"""Records the Trainer's step as one rank of a slice that is not here.

Run as a process of its own, with the rank and the topology as its arguments. Prints one JSON object.
"""

import hashlib
import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import torch
from torch import Tensor, nn

from tpu_backend.runtime.packed import Packed
from tpu_backend.runtime.signature import entries
from tputrain import OptimConfig, ParallelConfig, RunConfig
from tputrain.device import of_slices
from tputrain.errors import UserError
from tputrain.execution import ExecutionConfig
from tputrain.models import parameters_on_meta, vocabulary_loss
from tputrain.models.huggingface import build_huggingface
from tputrain.models.llama import Llama, LlamaConfig
from tputrain.planning.abstract_step import AbstractStep, abstract_step

CONFIG = LlamaConfig(512, 128, 256, 2, 2, 1, 64, 64, tie_word_embeddings=False, activation_checkpointing=True)
THEIRS = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
TOPOLOGY = "v5e:2x2"
SLICES = f"2x {TOPOLOGY}"
LAYOUTS = {
    TOPOLOGY: ({"shard": 4}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}),
    SLICES: ({"replicate": 2, "shard": 4}, {"replicate": 2, "shard": 2, "tensor": 2}),
}


class Reading(nn.Module):
    """Looks at a value in its forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden * 2 if hidden.sum().item() > 0 else hidden


def batch(rows: int) -> dict[str, Tensor]:
    one = torch.zeros(1, 1, dtype=torch.int64)
    return {name: one.expand(rows, 64) for name in ("input_ids", "labels", "position_ids", "document_ids")}


def count_joined() -> list[int]:
    """The parts of each flat buffer of FSDP2 that a program makes whole, a relayout on a TPU."""
    joined: list[int] = []
    whole = Packed.whole

    def counted(self: Packed) -> jax.Array:
        if len(self.parts) > 1:
            joined.append(len(self.parts))
        return whole(self)

    Packed.whole = counted  # type: ignore[method-assign]
    return joined


def num_losses(step: AbstractStep) -> list[int]:
    """Of a head over a vocabulary, which makes no logits; and of the gradients that it made."""
    names = Counter(entry.name for entry, _, _ in entries(step.segment["tape"]))
    return [names[f"tpu::{each}"] for each in ("linear_cross_entropy", "loss_gradient")]


def scattered(step: AbstractStep) -> list[int]:
    """Elements that a rank keeps of each reduce-scatter, in order."""
    operations = (entry for entry, _, _ in entries(step.segment["tape"]))
    return [each.outputs[0].sizes[0] for each in operations if each.name.endswith("::reduce_scatter")]


def num_summed(topology: str, checkpointing: Any, autocast: str | None) -> int:
    """All-reduces of a layer's input or its gradient, in a step of two tensor ranks."""
    parallel = ParallelConfig(**LAYOUTS[topology][-1])
    cfg = RunConfig(parallel=parallel, execution=ExecutionConfig(autocast=autocast))
    with parameters_on_meta():
        model = Llama(replace(CONFIG, num_key_value_heads=2, activation_checkpointing=checkpointing))
    step = abstract_step(model, cfg, batch(8))
    operations = (entry for entry, _, _ in entries(step.segment["tape"]))
    summed = (each.outputs[0].sizes for each in operations if each.name.endswith("::all_reduce"))
    return sum(list(sizes)[1:] == [64, CONFIG.hidden_size] for sizes in summed)


def digest(topology: str, step: AbstractStep) -> str:
    text = of_slices().lower_for(topology, step.segment).as_text()
    return hashlib.sha256(text.encode()).hexdigest()


def digests(topology: str) -> list[str]:
    """Of the step's program in each layout."""
    found = []
    for degrees in LAYOUTS[topology]:
        cfg = RunConfig(parallel=ParallelConfig(**degrees), execution=ExecutionConfig(autocast="bfloat16"))
        with parameters_on_meta():
            model = Llama(replace(CONFIG, num_key_value_heads=2))
        found.append(digest(topology, abstract_step(model, cfg, batch(8))))
    return found


def record() -> dict[str, object]:
    vocabulary_loss.MANY_LOGITS = 0  # as if they were many
    cfg = RunConfig(parallel=ParallelConfig(shard=-1), execution=ExecutionConfig(autocast="bfloat16"))
    with parameters_on_meta():
        model = Llama(CONFIG)
    step = abstract_step(model, cfg, batch(8))
    counted = count_joined()
    first = digest(TOPOLOGY, step)
    joined = [*counted]
    # Masters and the optimizer's state are there before the first step, so the second one is no other.
    with parameters_on_meta():
        rounded = Llama(CONFIG)
    masters = abstract_step(rounded, replace(cfg, optim=OptimConfig(master_weights=True)), batch(8))
    refusal = None
    try:
        abstract_step(Reading(), cfg, [torch.zeros(8, 8), torch.zeros(8, 8)], torch.nn.functional.mse_loss)
    except UserError as error:
        refusal = str(error)
    theirs = abstract_step(build_huggingface({"model_type": "llama", **THEIRS}), cfg, batch(8))
    return {
        "digest": first,
        "segments": step.num_segments,
        "joined": joined,
        "world_size": torch.distributed.get_world_size(),
        "backend": torch.distributed.get_backend(),
        "parameters": len(list(model.parameters())),
        "donated": len(step.segment["donated"]),
        "masters": [masters.num_segments, len(masters.segment["donated"])],
        "labels": Counter(step.segment["labels"]),
        "losses": [num_losses(each) for each in (step, theirs)],
        "summed": [
            num_summed(TOPOLOGY, kind, autocast)
            for kind in (False, True, "products")
            for autocast in (None, "bfloat16")
        ],
        "scattered": [scattered(each) for each in (step, theirs)],
        "refusal": refusal,
    }


if __name__ == "__main__":
    rank, topology = int(sys.argv[1]), sys.argv[2]
    of_slices().start(topology, rank)
    found = record() if topology == TOPOLOGY else {}
    print(json.dumps(found | {"digests": digests(topology)}))
