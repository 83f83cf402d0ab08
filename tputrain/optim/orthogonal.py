"""Muon's update, nearly orthogonal (Jordan et al., 2024), also of matrices that ranks have parts of."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz as newton_schulz

from tputrain.checkpoint.rows import divided_like, gathered, is_distributed


def orthogonalised(matrices: Sequence[Tensor], coefficients: Any, steps: int, eps: float) -> list[Tensor]:
    """Of each matrix (m, n) what PyTorch's Newton-Schulz iteration makes of the whole of it, in bfloat16.

    Of matrices that are divided among ranks the results are divided alike. Each rank gets some of the
    matrices whole and iterates on them: an exchange before, and one after. Only those that are divided along
    several dimensions of the mesh (FSDP with tensor parallelism) are gathered, and every rank iterates.
    """
    settings = (coefficients, steps, eps)
    found: dict[int, Tensor] = {}
    alike: dict[Any, list[int]] = {}
    for number, matrix in enumerate(matrices):
        if not is_distributed(matrix):
            found[number] = newton_schulz(matrix, *settings)
        elif (dim := _only_divided_dim(matrix)) is None:
            whole = gathered(matrix.bfloat16())
            found[number] = divided_like(newton_schulz(whole, *settings), matrix)
        else:
            alike.setdefault((tuple(matrix.shape), matrix.device_mesh, dim), []).append(number)  # type: ignore[attr-defined]
    for (_, _, dim), numbers in alike.items():
        found |= zip(numbers, _exchanged([matrices[each] for each in numbers], dim, settings), strict=True)
    return [found[number] for number in range(len(matrices))]


def _exchanged(matrices: list[Any], mesh_dim: int, settings: tuple[Any, ...]) -> Sequence[Tensor]:
    """Of matrices of one shape and layout, divided along `mesh_dim` of the mesh."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, placements = matrices[0].device_mesh, matrices[0].placements
    count = len(matrices)
    # All ranks iterate on equally many, in one program: zeros fill up.
    matrices = matrices + [torch.zeros_like(matrices[0])] * (-count % mesh.size(mesh_dim))
    stacked = torch.stack([each.bfloat16() for each in matrices])
    own = list(placements)
    own[mesh_dim] = Shard(0)
    whole = stacked.redistribute(placements=own).to_local()  # type: ignore[attr-defined]
    done = torch.stack([newton_schulz(each, *settings) for each in whole])
    parts = DTensor.from_local(done, mesh, own, run_check=False, shape=stacked.shape, stride=stacked.stride())
    return parts.redistribute(placements=stacked.placements).unbind()[:count]  # type: ignore[attr-defined]


def _only_divided_dim(matrix: Any) -> int | None:
    """The dimension of the mesh along which a matrix is divided; None: there is not exactly one."""
    divided = [dim for dim, placement in enumerate(matrix.placements) if not placement.is_replicate()]
    is_one = len(divided) == 1 and matrix.placements[divided[0]].is_shard()
    return divided[0] if is_one else None
