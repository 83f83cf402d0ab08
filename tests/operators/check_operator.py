"""One entry of op_db or foreach: forward, gradient, in-place and ``out=`` of every sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils._pytree import tree_leaves, tree_map

from tests.operators.checks import Checks, Run
from tests.operators.compare import Tolerances
from tests.operators.cotangents import Cotangents
from tests.operators.database import Entry, info_of
from tests.operators.outcome import Outcome
from tests.operators.place import CPU, Place
from tests.operators.twin import Twin

# Their values are whatever memory holds.
_UNINITIALISED = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)

# Decompositions that leave a sign or phase open: their samples say in `output_process_fn_grad` which part of
# the result is determined, and that part is compared.
_UP_TO_PHASE = frozenset({"svd", "linalg.svd", "svd_lowrank", "pca_lowrank", "linalg.eig", "linalg.eigh"})

# PyTorch wants some tensors on the host, whatever the device: the sections of tensor_split.
_HOST_ARGUMENTS = frozenset({"tensor_split"})


def check_operator(entry: Entry, most_samples: int | None = None) -> Outcome:
    info = info_of(entry)
    op = _with_host_arguments(info.op) if entry.name in _HOST_ARGUMENTS else info.op
    outcome = Outcome()
    initialised = entry.name not in _UNINITIALISED
    checks = Checks(outcome, Tolerances.of(info, entry.torch_dtype), initialised)
    differentiable = _is_differentiable(info, entry)
    samples = list(enumerate(_samples(info, entry, differentiable)))
    stride = -(-len(samples) // most_samples) if most_samples and samples else 1
    for number, sample in samples[::stride]:
        what = f"sample {number}"
        if entry.name in _UP_TO_PHASE:
            determined = _determined(op, sample)
            checks.add(f"{what}, form", _forward(op, sample), values=False)
            if checks.add(f"{what}, gradient", _backward(determined, sample)):
                outcome.samples += 1
            continue
        served = differentiable and checks.add(f"{what}, gradient", _backward(op, sample))
        if not served and not checks.add(what, _forward(op, sample)):
            continue
        outcome.samples += 1
        if info.inplace_variant is not None and not sample.broadcasts_input:
            checks.add(f"{what}, in place", _in_place(info.inplace_variant, sample))
        if info.supports_out and entry.database == "op_db":
            _check_out(checks, what, info.op, sample, empty_too=number == 0)
    checks.read()
    return outcome


def _is_differentiable(info: Any, entry: Entry) -> bool:
    dtype = entry.torch_dtype
    if not (info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)):
        return False
    return entry.database == "foreach" or dtype in info.supported_backward_dtypes("cpu")


def _samples(info: Any, entry: Entry, differentiable: bool) -> Iterator[SampleInput]:
    torch.manual_seed(0)
    samples = iter(info.sample_inputs("cpu", entry.torch_dtype, requires_grad=differentiable))
    while True:
        try:
            yield next(samples)
        except StopIteration:
            return
        except (RuntimeError, NotImplementedError):
            return  # what makes the sample is not served by the CPU in this dtype


def _arguments(sample: SampleInput, place: Place, detached: bool) -> tuple[list[Any], dict[str, Any]]:
    given = (sample.input, *sample.args), sample.kwargs
    args, kwargs = Twin(place).of(given)
    if detached:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(False)
    return args, kwargs


def _forward(op: Callable[..., Any], sample: SampleInput) -> Run:
    def run(place: Place) -> Any:
        args, kwargs = _arguments(sample, place, detached=True)
        return op(*args, **kwargs)

    return run


def _in_place(op: Callable[..., Any], sample: SampleInput) -> Run:
    """The argument is looked at as well as what is returned: it may be a view into something larger."""

    def run(place: Place) -> Any:
        args, kwargs = _arguments(sample, place, detached=True)
        returned = op(*args, **kwargs)
        return args[0], returned

    return run


def _backward(op: Callable[..., Any], sample: SampleInput) -> Run:
    """Outputs, and the gradients of every argument that wants one, for fixed random cotangents."""
    cotangents = Cotangents()

    def run(place: Place) -> Any:
        args, kwargs = _arguments(sample, place, detached=False)
        results = op(*args, **kwargs)
        wanted = [leaf for leaf in tree_leaves((args, kwargs)) if _wants_gradient(leaf)]
        outputs = [
            leaf for leaf in tree_leaves(sample.output_process_fn_grad(results)) if _wants_gradient(leaf)
        ]
        if not wanted or not outputs:
            return results, []
        gradients = torch.autograd.grad(outputs, wanted, cotangents.of(outputs, place), allow_unused=True)
        return results, gradients

    return run


def _with_host_arguments(op: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        on_host = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, args)
        return op(first, *on_host, **kwargs)

    return call


def _determined(op: Callable[..., Any], sample: SampleInput) -> Callable[..., Any]:
    process = sample.output_process_fn_grad
    sample.output_process_fn_grad = lambda results: results
    return lambda *args, **kwargs: process(op(*args, **kwargs))


def _wants_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _check_out(
    checks: Checks, what: str, op: Callable[..., Any], sample: SampleInput, empty_too: bool
) -> None:
    """``out=`` into tensors of the right shape and strides; ``empty_too``: into empty ones as well."""
    try:
        shapes = _forward(op, sample)(CPU)
    except Exception:
        return
    if not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(shapes)):
        return

    def fitting(leaf: torch.Tensor, place: Place) -> torch.Tensor:
        dtype = place.dtype(leaf.dtype)
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=dtype, device=place.device).zero_()

    def empty(leaf: torch.Tensor, place: Place) -> torch.Tensor:
        return torch.empty(0, dtype=place.dtype(leaf.dtype), device=place.device)

    def write_to(make: Callable[[torch.Tensor, Place], torch.Tensor]) -> Run:
        def run(place: Place) -> Any:
            args, kwargs = _arguments(sample, place, detached=True)
            out = tree_map(lambda leaf: make(leaf, place), shapes)
            returned = op(*args, **kwargs, out=out)
            same = [a is b for a, b in zip(tree_leaves(returned), tree_leaves(out))]
            # PyTorch promises no strides for one that it had to resize.
            return (tree_map(torch.Tensor.contiguous, out) if make is empty else out), same

        return run

    checks.add(f"{what}, out=", write_to(fitting))
    if empty_too:
        checks.add(f"{what}, out= of no size", write_to(empty))
