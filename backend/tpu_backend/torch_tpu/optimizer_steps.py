"""What the device does before and after each step of an optimizer, through PyTorch's hooks for that."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tpu_backend import _C


def install() -> None:
    hooks: list[tuple[Callable[..., object], Callable[..., None]]] = [
        (register_optimizer_step_pre_hook, _keep_step_counts_on_the_host),
        (register_optimizer_step_post_hook, _end_step),
    ]
    for register, hook in hooks:
        # As torch.compiler.disable does, whose import takes a second: Dynamo calls it, and warns of no C++.
        hook._torchdynamo_disable = True  # type: ignore[attr-defined]
        register(hook)


def _end_step(*_: object) -> None:
    """An optimizer step ends the work of a step: the op after it begins a new program.

    The cut waits for that op, so that gradients dropped by ``zero_grad`` need not be outputs.
    """
    if _C.is_initialized():
        _C.end_step(_C.current_device())


def _keep_step_counts_on_the_host(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Move step counts back to where PyTorch's optimizers make them.

    ``torch.load(map_location="tpu")`` of an optimizer puts them on the device. Each step would then read
    every one of them, and be several programs.
    """
    for group in optimizer.param_groups:
        if "foreach" not in group or group.get("fused") or group.get("capturable"):
            continue  # it is not PyTorch's, or counts on the device
        # They were loaded together: the first tells whether there is anything to do.
        states = (state for each in group["params"] if (state := optimizer.state.get(each)))
        for state in itertools.takewhile(lambda state: _is_on_tpu(state.get("step")), states):
            state["step"] = state["step"].cpu()


def _is_on_tpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "tpu"
