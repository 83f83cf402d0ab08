"""FSDP2's training step, recorded as one rank of four and compiled for TPU chips that are not here.

Run as a process of its own: it loads libtpu.  Prints one JSON object: by chip the program's collectives.
"""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from tpu_backend import ahead_of_time, hlo

WIDTH, HIDDEN, LAYERS = 256, 640, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


def main() -> None:
    torch.set_float32_matmul_precision("medium")  # six passes take several times as long to compile
    ahead_of_time.start("v5e:2x2")
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))
    with torch.device("meta"):
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    @torch.tpu.spmd
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    x = torch.zeros(1024, WIDTH, device="tpu")
    for _ in range(3):  # the optimizer's state is there from the second one on
        segments = ahead_of_time.recorded()
        step(x)
    segments = segments or ahead_of_time.recorded()
    segment = max(segments, key=lambda each: len(each["tape"]))
    with pytest.raises(RuntimeError, match="has no value here"):
        step(x).item()
    found = {
        chip: [
            [each.kind, each.results, each.is_async]
            for each in hlo.collectives(ahead_of_time.compile_for(chip, segment).as_text())
        ]
        for chip in ("v5e:2x2", "v6e:2x2")
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
