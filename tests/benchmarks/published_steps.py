"""The cost model against published steps: `python -m tests.benchmarks.published_steps`.

The steps are MaxText's, as its makers measured them: AI-Hypercomputer/tpu-recipes (training/trillium, v5p,
ironwood). The cost model's constants come from the compiler or are assumed, as each of them says. The model
here is our Llama; parameters are float32, gathered as bfloat16, as there. Scatters are taken to have products
beside them there; in our own steps they have none.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tputrain.models.llama import LLAMA_CONFIGS, Llama
from tputrain.parallel.cost_model import CostModel, Seconds
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.layout import Layout
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Workload


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
PRECISION = Precision(optimizer=8.0, gathered=2.0, scattered=2.0)


def workload(name: str, sequence: int) -> Workload:
    def batch(rows: int) -> dict[str, Tensor]:
        return {
            key: torch.empty(rows, sequence, dtype=torch.long, device="meta")
            for key in ("input_ids", "labels")
        }

    with torch.device("meta"):
        model = Llama(LLAMA_CONFIGS[name])
    return workload_of(model, batch, name=name, autocast="bfloat16")


def predicted(step: Step) -> tuple[Seconds, float]:
    """The step, and its MFU."""
    topology = Topology.parse(step.topology)
    work = workload(step.model, step.sequence)
    layout = Layout(topology, tuple((1, 1, axis.size, 1) for axis in topology.axes))
    seconds = CostModel(work, topology, PRECISION, scatters_wait=False).seconds(
        layout, step.rows, 1, step.rung
    )
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
