"""The cost model against published steps: `python -m tests.benchmarks.published_steps`.

The steps are MaxText's, as its makers measured them: AI-Hypercomputer/tpu-recipes (training/trillium, v5p,
ironwood). The constants of the cost model were tuned on these, and on no other published ones. The model
here is our Llama with an attention kernel; parameters are float32, gathered as bfloat16, as there.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain.models.llama import LLAMA_CONFIGS, Attention, Llama, LlamaConfig, rotate
from tputrain.parallel.cost_model import CostModel, Seconds
from tputrain.parallel.layout import Layout
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Workload, workload_of


@dataclass(frozen=True)
class Step:
    model: str
    topology: str
    rows: float
    """Sequences a device."""
    rung: str
    seconds: float
    sequence: int = 8192


STEPS = (
    Step("llama-8b", "v6e:2x4", 3, "offload", 3.443),
    Step("llama-8b", "v6e:16x16", 4, "offload", 4.546),
    Step("llama-70b", "v6e:16x16", 5, "offload", 42.656),
    Step("llama-405b", "v5p:8x8x8", 2, "layers", 131.474),
    Step("llama-70b", "tpu7x:4x4x4", 2, "layers", 12.20),
)
PRECISION = Precision(optimizer=8.0, gathered=2.0)


class KernelAttention(Attention):
    """The same attention as one operation."""

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
        B, S, _ = hidden.shape
        query, key, value = (
            each(hidden).view(B, S, -1, self.head_dim).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, S, -1))


def with_kernel(config: LlamaConfig) -> Llama:
    """On meta."""
    with torch.device("meta"):
        model = Llama(config)
    for layer in model.model.layers:
        layer.self_attn.__class__ = KernelAttention
    return model


def workload(name: str, sequence: int) -> Workload:
    def batch(rows: int) -> dict[str, Tensor]:
        return {
            key: torch.empty(rows, sequence, dtype=torch.long, device="meta")
            for key in ("input_ids", "labels")
        }

    model = with_kernel(LLAMA_CONFIGS[name])
    return workload_of(model, batch, name=name, autocast="bfloat16", has_attention_kernel=True)


def predicted(step: Step) -> tuple[Seconds, float]:
    """The step, and its MFU."""
    topology = Topology.parse(step.topology)
    work = workload(step.model, step.sequence)
    layout = Layout(topology, tuple((1, 1, axis.size, 1) for axis in topology.axes))
    seconds = CostModel(work, topology, PRECISION).seconds(layout, step.rows, 1, step.rung)
    flops = work.model_flops(step.rows)
    return seconds, flops / seconds.total / topology.peak_flops


def main() -> None:
    print(f"{'model':10} {'topology':12} {'published':>9} {'predicted':>9} {'error':>7}  {'MFU':>5}  where")
    for step in STEPS:
        seconds, mfu = predicted(step)
        error = seconds.total / step.seconds - 1
        where = ", ".join(
            f"{name} {value:.2f}"
            for name, value in vars(seconds).items()
            if isinstance(value, float) and value > 0.005
        )
        print(
            f"{step.model:10} {step.topology:12} {step.seconds:9.2f} {seconds.total:9.2f} {error:+7.1%}  "
            f"{mfu:5.1%}  {where}"
        )


if __name__ == "__main__":
    main()
