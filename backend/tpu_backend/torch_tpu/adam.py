"""Adam and AdamW as PyTorch makes them by default, in one operation.

For parameters on an accelerator PyTorch takes its form over lists (`foreach`): ten operations, each of which
costs the host its time, and in strict mode a launch. Its form of one operation must be asked for
(`fused=True`). Here the first is computed by the operation of the second: equal but for rounding, and of
16-bit parameters in float32. The steps stay counted where they were, on the host unless `capturable`.

Of DTensors each rank takes its own part. DTensor would find out for each of the ten lists how its elements
are divided, which is half of the host's time of a first step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim import adam

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PLAIN = (Tensor, nn.Parameter)  # of other subclasses the lists are as before


def install() -> None:
    over_lists = adam._multi_tensor_adam

    def step(
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        state_steps: list[Tensor],
        **options: Any,
    ) -> None:
        lists = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs
        parts = _parts(lists) if _fits_one_operation(state_steps, options) else None
        if parts is None:
            over_lists(*lists, state_steps, **options)
        else:
            _step(parts, state_steps, **options)
            if parts is not lists:
                _count_versions([lists[0], *lists[2:]], [parts[0], *parts[2:]])

    adam._multi_tensor_adam = step  # type: ignore[assignment]  # it takes the same arguments


def _fits_one_operation(state_steps: list[Tensor], options: dict[str, Any]) -> bool:
    numbers = (options["lr"], options["beta1"], options["beta2"])
    return not (
        options["has_complex"]
        or options["differentiable"]
        or torch.compiler.is_compiling()
        or any(isinstance(number, Tensor) for number in numbers)
        or any(type(each) not in _PLAIN for each in state_steps)
    )


def _parts(lists: tuple[list[Tensor], ...]) -> tuple[list[Tensor], ...] | None:
    """What this rank has of each tensor: its part of a DTensor, else the tensor. None where one is on another
    device, or parts of a parameter and of what belongs to it do not hold the same elements.
    """
    if any(each.device.type != "tpu" for each in lists[0]):
        return None
    if all(type(each) in _PLAIN for each in lists[0]):
        return lists
    of_tensors = [_parts_of(tensors) for tensors in zip(*filter(None, lists), strict=True)]
    if not all(of_tensors):
        return None
    parts = iter(map(list, zip(*of_tensors, strict=True)))
    return tuple(next(parts) if each else [] for each in lists)


def _parts_of(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
    """The same for a parameter and what belongs to it."""
    if all(type(each) in _PLAIN for each in tensors):
        return tensors
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or any(type(each) is not module.DTensor for each in tensors):
        return None
    divided = cast("tuple[DTensor, ...]", tensors)
    layouts = {(each.device_mesh, each.placements) for each in divided}
    if len(layouts) > 1 or any(placement.is_partial() for placement in divided[0].placements):
        return None
    return tuple(each.to_local() for each in divided)


def _count_versions(written: list[list[Tensor]], parts: list[list[Tensor]]) -> None:
    """Autograd looks at the versions of DTensors, and their parts alone were written."""
    pairs = zip(chain(*written), chain(*parts), strict=True)
    torch.autograd.graph.increment_version([whole for whole, part in pairs if whole is not part])


def _step(
    lists: tuple[list[Tensor], ...],
    state_steps: list[Tensor],
    *,
    decoupled_weight_decay: bool,
    has_complex: bool,
    capturable: bool,
    differentiable: bool,
    **options: Any,
) -> None:
    if not lists[0]:
        return
    if state_steps[0].is_cpu:  # then they are numbers of the operation
        one = torch.tensor(1.0, device="cpu")  # a Python number would be made a tensor for each of them
        torch._foreach_add_(state_steps, one, alpha=1.0)
    else:
        torch._foreach_add_(state_steps, 1)
    operation: Callable[..., None] = torch._fused_adamw_ if decoupled_weight_decay else torch._fused_adam_
    operation(*lists, state_steps, **options)
