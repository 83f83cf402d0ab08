"""Determinants and solutions by LU."""

import torch

from tpu_backend.composite.outputs import assign

_lu_factor = torch.ops.aten.linalg_lu_factor_ex.out


def _factor_for_det(A, LU, pivots):
    """The diagonal of U. The derivatives of det and slogdet expect the factors of the transpose where A is
    contiguous and real, as LAPACK's column-major order would have it (linalg_det_backward in torch's
    FunctionsManual.cpp).
    """
    is_transposed = A.is_contiguous() and not A.is_complex()
    info = A.new_empty(0, dtype=torch.int32)
    _lu_factor(A.mT if is_transposed else A, LU=LU, pivots=pivots, info=info)
    return LU.diagonal(0, -2, -1)


def _permutation_sign(pivots):
    """1 or -1: the sign of the permutation that the pivots (from 1) make."""
    unmoved = torch.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    return pivots.ne(unmoved).sum(-1).remainder(2).mul(-2).add(1)


def det(A, *, result, LU, pivots):
    diagonal = _factor_for_det(A, LU, pivots)
    assign(result, diagonal.prod(-1) * _permutation_sign(pivots))
    return result, LU, pivots


def slogdet(A, *, sign, logabsdet, LU, pivots):
    diagonal = _factor_for_det(A, LU, pivots)
    assign(sign, diagonal.sgn().prod(-1) * _permutation_sign(pivots))
    assign(logabsdet, diagonal.abs().log().sum(-1))
    return sign, logabsdet, LU, pivots


def solve_ex(A, B, *, left=True, check_errors=False, result, LU, pivots, info):
    _lu_factor(A, LU=LU, pivots=pivots, info=info)
    # B is one vector for each matrix where it has all dims of A but the last (linalg_solve_is_vector_rhs)
    is_vector = B.dim() == 1 or B.shape == A.shape[:-1]
    solution = torch.linalg.lu_solve(LU, pivots, B.unsqueeze(-1) if is_vector else B, left=left)
    assign(result, solution.squeeze(-1) if is_vector else solution)
    if check_errors:
        torch._linalg_check_errors(info, "torch.linalg.solve_ex", is_matrix=A.dim() == 2)
    return result, LU, pivots, info


KERNELS = {"_linalg_det.result": det, "_linalg_slogdet.sign": slogdet, "_linalg_solve_ex.result": solve_ex}
