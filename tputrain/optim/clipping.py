"""Keeping gradients small enough for the step that they are taken for."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import is_distributed, local_part


def clip_gradients(
    parameters: Sequence[nn.Parameter], max_norm: float | None, max_value: float | None
) -> Tensor:
    """Bound each gradient element to +-`max_value`, then scale all down to the norm `max_norm`; None: not.

    Returns the norm of all gradients before either, a scalar on the device: nothing is read.
    """
    before = norm = _norm(parameters)
    alike = _by_mesh(parameters)
    if max_value is not None:
        for each in alike:
            nn.utils.clip_grad_value_(each, max_value)
        norm = _norm(parameters)
    if max_norm is not None:
        for each in alike:
            nn.utils.clip_grads_with_norm_(each, max_norm, norm)
    return before


def _norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Of all gradients together; of those of half precision in float32."""
    alike: dict[Any, list[Tensor]] = {}
    for gradient in [p.grad for p in parameters if p.grad is not None]:
        own = local_part(gradient)
        alike.setdefault(_divided_by(gradient), []).append(own.float() if own.dtype.itemsize == 2 else own)
    norms = []
    for (mesh, dims), gradients in alike.items():
        norm = nn.utils.get_total_norm(gradients)
        for dim in dims:  # each rank knows the norm of its parts: this adds them up
            norm = _total(norm.square(), mesh, dim).sqrt()
        norms.append(norm)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def _divided_by(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh over whose ranks a tensor is divided, and along which of its dimensions; None: it is whole."""
    if not is_distributed(tensor):
        return None, ()
    mesh, placements = tensor.device_mesh, enumerate(tensor.placements)
    return mesh, tuple(dim for dim, each in placements if not each.is_replicate() and mesh.size(dim) > 1)


def _total(value: Tensor, mesh: Any, dim: int) -> Tensor:
    """The sum over the ranks along a dimension of the mesh."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    placements = [Partial() if each == dim else Replicate() for each in range(mesh.ndim)]
    return DTensor.from_local(value, mesh, placements, run_check=False).full_tensor()


def _by_mesh(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Together those that the same ranks have parts of: PyTorch takes no others at once.

    With tensor parallelism some are cut over more ranks than others.
    """
    alike: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        alike.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(alike.values())
