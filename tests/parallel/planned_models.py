"""Models and recipes that tests plan."""

from typing import Any

import torch
from torch import Tensor

from tputrain.cli.plan import task_of
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig
from tputrain.optim.config import AdamWConfig
from tputrain.parallel.candidate import Task
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.plan import Plan, make_plan
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Workload
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe


def text(sequence: int) -> Any:
    def batch(rows: int) -> dict[str, Tensor]:
        size = (rows, sequence)
        return {key: torch.empty(size, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}

    return batch


def llama(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


_workloads: dict[tuple[str, int], Workload] = {}


def workload(name: str, sequence: int) -> Workload:
    if (name, sequence) not in _workloads:
        model = llama(LLAMA_CONFIGS[name])
        _workloads[name, sequence] = workload_of(model, text(sequence), name=name, autocast="bfloat16")
    return _workloads[name, sequence]


def planned(name: str, topology: str, rows: int, sequence: int) -> Plan:
    precision = Precision.of(AdamWConfig(), "bfloat16")
    return make_plan(Task(workload(name, sequence), Topology.parse(topology), rows, precision=precision))


def plan_of_recipe(recipe: str, topology: str, *overrides: str) -> Plan:
    return make_plan(task_of(read_recipe(find_recipe(recipe), list(overrides)), Topology.parse(topology)))
