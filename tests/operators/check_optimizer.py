"""One entry of optim_db: parameters and state after three steps, for every configuration."""

from __future__ import annotations

from typing import Any

import torch

from tests.operators.checks import Checks, Run
from tests.operators.compare import Tolerances
from tests.operators.database import Entry, info_of
from tests.operators.outcome import Outcome
from tests.operators.place import Place

_STEPS = 3


def check_optimizer(entry: Entry, most_samples: int | None = None) -> Outcome:
    info = info_of(entry)
    outcome = Outcome()
    checks = Checks(outcome, Tolerances.of(info, entry.torch_dtype))
    for config in info.optim_inputs_func(device="cpu")[:most_samples]:
        for implementation in _implementations(info, config.kwargs):
            what = f"{config.desc or 'defaults'}, {implementation or 'as given'}"
            kwargs = {**config.kwargs, **({implementation: True} if implementation else {})}
            if checks.add(what, _train(info, entry.torch_dtype, kwargs), may_be_random=False):
                outcome.samples += 1
    checks.read()
    return outcome


def _implementations(info: Any, kwargs: dict[str, Any]) -> list[str]:
    """ "" for the configuration as it is, then each implementation that it does not decide itself."""
    if any(name in kwargs for name in ("foreach", "fused", "differentiable")):
        return [""]
    fused = "fused" in info.supported_impls and "cpu" in info.supports_fused_on
    return ["", *(["foreach"] if "foreach" in info.supported_impls else []), *(["fused"] if fused else [])]


def _train(info: Any, dtype: torch.dtype, kwargs: dict[str, Any]) -> Run:
    def run(place: Place) -> Any:
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape: int) -> torch.Tensor:
            return place.to(torch.randn(shape, dtype=dtype, generator=generator))

        parameters = [torch.nn.Parameter(numbers(*shape)) for shape in ((4, 3), (3,), (2, 3, 2))]
        given = {
            name: place.to(value) if isinstance(value, torch.Tensor) and value.dim() else value
            for name, value in kwargs.items()
        }
        optimizer = info.optim_cls(parameters, **given)
        gradients = [[numbers(*parameter.shape) for parameter in parameters] for _ in range(_STEPS)]
        for step in range(_STEPS):
            for parameter, gradient in zip(parameters, gradients[step]):
                parameter.grad = gradient.to_sparse() if info.only_supports_sparse_grads else gradient

            def closure(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = sum((p - g).abs().square().sum() for p, g in zip(parameters, gradients[step]))
                loss.backward()
                return loss

            if info.step_requires_closure:
                optimizer.step(closure)
            else:
                optimizer.step()
        state = [
            value
            for parameter in parameters
            for _, value in sorted(optimizer.state[parameter].items(), key=lambda item: item[0])
            if isinstance(value, torch.Tensor)
        ]
        return parameters, state

    return run
