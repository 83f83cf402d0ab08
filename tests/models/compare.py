"""Trains one model on cpu and on tpu from the same weights, and compares them."""

import copy
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.models.case import Batch, Case

STEPS = 5
COMPARED_STEPS = 3  # losses are compared, and programs may be compiled, up to this step
LOSS_TOLERANCE = 1e-4  # relative
GRADIENT_TOLERANCE = 1e-3  # relative, by norm
# Some gradients are zero but for rounding: attention's key bias, a bias before a batch norm. What float32
# leaves there is proportional to the sums it comes from: this much of the norm of all gradients together.
ROUNDING = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Run:
    """What five training steps left behind; `gradients` are those of the first step, on the CPU."""

    losses: list[float]
    gradients: dict[str, Tensor | None]
    compilations: list[int]
    fallbacks: dict[str, int]
    seconds: float


@dataclass(frozen=True)
class Row:
    """One line of the list. `problems` is empty where the model passes."""

    name: str
    family: str
    seconds: float = 0.0
    compilations: int = 0
    late_compilations: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    loss_error: float = 0.0
    gradient_error: float = 0.0
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


def check(case: Case) -> Row:
    """Train the case on both devices."""
    torch.manual_seed(0)
    model = case.model().train()
    batches = [case.batch(torch.Generator().manual_seed(step)) for step in range(STEPS)]
    expected = train(copy.deepcopy(model), batches[:COMPARED_STEPS], "cpu")
    return judge(case, expected, train(model, batches, "tpu"))


def train(model: nn.Module, batches: list[Batch], device: str) -> Run:
    """AdamW steps, one a batch, written as a script would; the losses are read at the end."""
    on_tpu = device == "tpu"
    fallbacks_before = torch.tpu.fallback_stats()
    compiled_before = torch.tpu.compile_stats()["compilations"] if on_tpu else 0
    start = time.perf_counter()
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, compilations = [], []
    gradients: dict[str, Tensor | None] = {}
    for number, batch in enumerate(batches):
        loss = model(**{name: value.to(device) for name, value in batch.items()})
        loss.backward()
        if number == 0:
            gradients = {name: _on_host(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if on_tpu:
            torch.tpu.synchronize()
            compilations.append(torch.tpu.compile_stats()["compilations"] - compiled_before)
    values = [loss.item() for loss in losses]
    fallbacks = fallbacks_since(fallbacks_before)
    return Run(values, gradients, compilations, fallbacks, time.perf_counter() - start)


def fallbacks_since(before: dict[str, int]) -> dict[str, int]:
    """{operator: calls} that ran on the CPU since `before`, an earlier `torch.tpu.fallback_stats()`."""
    now = torch.tpu.fallback_stats()
    return {name: calls - before.get(name, 0) for name, calls in now.items() if calls > before.get(name, 0)}


def _on_host(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.detach().cpu().clone()


def judge(case: Case, expected: Run, actual: Run) -> Row:
    """The bars: losses, gradients, no fallback, no late compilation."""
    problems = []
    loss_error = max(
        abs(got - want) / max(abs(want), 1e-30) for want, got in zip(expected.losses, actual.losses)
    )
    if not loss_error <= LOSS_TOLERANCE:  # NaN is an error too
        problems.append(f"losses {actual.losses[:COMPARED_STEPS]}, expected {expected.losses}")
    gradient_error, worst = _worst_gradient(expected.gradients, actual.gradients)
    if not gradient_error <= GRADIENT_TOLERANCE:
        problems.append(f"gradient of {worst} is off by {gradient_error:.1e}")
    if actual.fallbacks:
        problems.append(f"runs on the CPU: {', '.join(sorted(actual.fallbacks))}")
    late = actual.compilations[-1] - actual.compilations[COMPARED_STEPS - 1]
    if late:
        problems.append(f"{late} compilations after step {COMPARED_STEPS}")
    return Row(
        case.name,
        case.family,
        actual.seconds,
        actual.compilations[-1],
        late,
        actual.fallbacks,
        loss_error,
        gradient_error,
        tuple(problems),
    )


def _worst_gradient(
    expected: dict[str, Tensor | None], actual: dict[str, Tensor | None]
) -> tuple[float, str]:
    """The largest error by the gradient's norm, and whose it is; infinite where one side has none."""
    norms = [gradient.norm() for gradient in expected.values() if gradient is not None]
    floor = ROUNDING * torch.stack(norms).norm().item() / GRADIENT_TOLERANCE
    worst = (0.0, "")
    for name, want in expected.items():
        got = actual[name]
        if want is None or got is None:
            error = 0.0 if want is got else float("inf")
        else:
            error = (got - want).norm().item() / max(want.norm().item(), floor, 1e-30)
        if not error <= worst[0]:
            worst = (error, name)
    return worst
