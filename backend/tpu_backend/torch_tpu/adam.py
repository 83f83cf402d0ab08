"""Adam and AdamW as PyTorch makes them by default, in one operation.

For parameters on an accelerator PyTorch takes its form over lists (`foreach`): ten operations, each of which
costs the host its time, and in strict mode a launch. Its form of one operation must be asked for
(`fused=True`). Here the first is computed by the operation of the second: equal but for rounding, and of
16-bit parameters in float32. The steps stay counted where they were, on the host unless `capturable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import adam

_PLAIN = (Tensor, nn.Parameter)  # of DTensors and other subclasses the lists are as before


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
        if _fits_one_operation(params, options):
            _step(lists, state_steps, **options)
        else:
            over_lists(*lists, state_steps, **options)

    adam._multi_tensor_adam = step  # type: ignore[assignment]  # it takes the same arguments


def _fits_one_operation(params: list[Tensor], options: dict[str, Any]) -> bool:
    numbers = (options["lr"], options["beta1"], options["beta2"])
    return (
        not (options["has_complex"] or options["differentiable"] or torch.compiler.is_compiling())
        and not any(isinstance(number, Tensor) for number in numbers)
        and all(type(each) in _PLAIN and each.device.type == "tpu" for each in params)
    )


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
