"""One entry of module_db: output and every gradient of every sample, in training and in evaluation."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tests.operators.checks import Checks, Run
from tests.operators.compare import Tolerances
from tests.operators.cotangents import Cotangents
from tests.operators.database import Entry, info_of
from tests.operators.outcome import Outcome
from tests.operators.place import CPU, Place
from tests.operators.twin import Twin


def check_module(entry: Entry, most_samples: int | None = None) -> Outcome:
    info = info_of(entry)
    outcome = Outcome()
    checks = Checks(outcome, Tolerances.of(info, entry.torch_dtype))
    for training in (True, False):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=entry.torch_dtype, requires_grad=True, training=training
        )
        samples = list(enumerate(samples))
        stride = -(-len(samples) // most_samples) if most_samples and samples else 1
        for number, sample in samples[::stride]:
            if sample.forward_input is None:
                continue
            what = f"sample {number}, {'training' if training else 'evaluation'}"
            torch.manual_seed(0)
            try:
                module = _build(info, entry, sample, training)
            except Exception:
                continue  # the CPU cannot make it in this dtype
            if checks.add(f"{what}, gradient", _step(module, sample, backward=True)) or checks.add(
                what, _step(module, sample, backward=False)
            ):
                outcome.samples += 1
    checks.read()
    return outcome


def _build(info: Any, entry: Entry, sample: Any, training: bool) -> torch.nn.Module:
    args, kwargs = sample.constructor_input.args, sample.constructor_input.kwargs
    module = info.module_cls(*args, **kwargs).to(entry.torch_dtype)
    module.train(training)
    if info.is_lazy:
        module(*Twin(CPU).of(sample.forward_input.args), **Twin(CPU).of(sample.forward_input.kwargs))
    return module


def _step(original: torch.nn.Module, sample: Any, backward: bool) -> Run:
    """Outputs, buffers, and the gradients of parameters and arguments."""
    cotangents = Cotangents()

    def run(place: Place) -> Any:
        module = place.to(copy.deepcopy(original))
        args, kwargs = Twin(place).of((sample.forward_input.args, sample.forward_input.kwargs))
        results = module(*args, **kwargs)
        buffers = list(module.buffers())
        outputs = [leaf for leaf in tree_leaves(results) if _wants_gradient(leaf)]
        wanted = [
            leaf for leaf in (*module.parameters(), *tree_leaves((args, kwargs))) if _wants_gradient(leaf)
        ]
        if not (backward and outputs and wanted):
            return results, buffers, []
        gradients = torch.autograd.grad(outputs, wanted, cotangents.of(outputs, place), allow_unused=True)
        return results, buffers, gradients

    return run


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
