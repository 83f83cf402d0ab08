"""Matrix factorisations, inverses and triangular solves.

``info`` outputs report failure as LAPACK would (non-zero), seen from NaN in the result. Determinants and
``linalg.solve`` are made of these in csrc/composites.cpp.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.matmul import matmul
from tpu_backend.lowering.registry import CannotCompile, NotLoweredError, lowering

_LU_OF_SINGLE_PRECISION = CannotCompile(
    "UNIMPLEMENTED: only F32 and C64 types are implemented in LuDecomposition", frozenset({"float64"})
)
# Its process dies. complex64 compiles; so would singular values alone, but a declaration knows dtypes only.
_SVD_OF_FLOAT32 = CannotCompile(
    "aborts in TransposeFolding: Check failed: buffer != nullptr", frozenset({"float32"})
)


def _info(result):
    failed = (
        jnp.any(~jnp.isfinite(jnp.abs(result)), (-2, -1))
        if result.size
        else jnp.zeros(result.shape[:-2], bool)
    )
    return failed.astype(jnp.int32)


def _adjoint(matrix):
    return matrix.mT.conj()


@lowering("linalg_cholesky_ex")
def cholesky_ex(self, *, upper=False, check_errors=False):
    factor = jnp.linalg.cholesky(_adjoint(self) if upper else self, symmetrize_input=False)
    return _adjoint(factor) if upper else factor, _info(factor)


@lowering("cholesky")
def cholesky(self, upper=False):
    return cholesky_ex(self, upper=upper)[0]


@lowering("linalg_qr")
def qr(A, mode="reduced", out=None):
    if mode == "r":
        return jnp.zeros(out[0].shape, out[0].dtype), jnp.linalg.qr(A, mode="r")
    return tuple(jnp.linalg.qr(A, mode=mode))


@lowering("_linalg_eigh")
def eigh(A, UPLO="L", compute_v=True, out=None):
    lower = UPLO.upper() == "L"
    if compute_v:
        return tuple(jnp.linalg.eigh(A, UPLO="L" if lower else "U", symmetrize_input=False))
    return jnp.linalg.eigvalsh(A, UPLO="L" if lower else "U", symmetrize_input=False), _nothing(out[1])


def _nothing(spec):
    return jnp.zeros(spec.shape, spec.dtype)


def _require_finite(A):
    """Demand it in the words of PyTorch's CPU, which names the first matrix of a batch that is not."""
    wrong = jnp.any(~jnp.isfinite(A), (-2, -1)).reshape(-1)
    if wrong.size == 0:
        return
    first = jnp.where(jnp.any(wrong), jnp.argmax(wrong), -1)
    which = "" if A.ndim == 2 else "(Batch element {index}): "
    problem = "The algorithm failed to converge because the input matrix contained non-finite values."
    require_in_range(first, -1, 0, torch.linalg.LinAlgError, f"linalg.svd: {which}{problem}")


@lowering("_linalg_svd", on_tpu=_SVD_OF_FLOAT32)
def svd(A, full_matrices=False, compute_uv=True, *, driver=None, out=None):
    _require_finite(A)
    if compute_uv:
        return tuple(jnp.linalg.svd(A, full_matrices=full_matrices))
    return _nothing(out[0]), jnp.linalg.svd(A, compute_uv=False), _nothing(out[2])


# ---- triangular systems


def _solve_triangular(A, B, upper, left, unitriangular, transpose=False):
    batch = jnp.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A = jnp.broadcast_to(A, batch + A.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return lax.linalg.triangular_solve(
        A, B, left_side=left, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )


@lowering("linalg_solve_triangular")
def solve_triangular(self, B, *, upper, left=True, unitriangular=False):
    return _solve_triangular(self, B, upper, left, unitriangular)


@lowering("triangular_solve")
def triangular_solve(self, A, upper=True, transpose=False, unitriangular=False):
    solution = _solve_triangular(A, self, upper, True, unitriangular, transpose)
    return solution, jnp.broadcast_to(A, solution.shape[:-2] + A.shape[-2:])


@lowering("_cholesky_solve_helper")
def cholesky_solve(self, A, upper):
    factor = _adjoint(A) if upper else A
    half = _solve_triangular(factor, self, False, True, False)
    return _solve_triangular(_adjoint(factor), half, True, True, False)


@lowering("cholesky_inverse")
def cholesky_inverse(self, upper=False):
    identity = jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)
    return cholesky_solve(identity, self, upper)


# ---- LU; pivots count from 1


def _needs_pivots(pivot):
    if not pivot:
        raise NotLoweredError("LU without pivoting: PyTorch refuses it, in its own words on the CPU")


@lowering("linalg_lu_factor_ex", on_tpu=_LU_OF_SINGLE_PRECISION)
def lu_factor_ex(A, *, pivot=True, check_errors=False):
    _needs_pivots(pivot)
    factors, pivots, _ = lax.linalg.lu(A)
    return factors, pivots + 1, _first_zero_pivot(factors)


def _first_zero_pivot(factors):
    """Which element of the diagonal of U is the first that is zero, from 1; 0 where none is."""
    singular = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    if factors.size == 0:
        return jnp.zeros(factors.shape[:-2])
    return jnp.where(jnp.any(singular, -1), jnp.argmax(singular, -1) + 1, 0)


def _permutation(pivots, size):
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, size)


def _unpack(factors):
    rows, columns = factors.shape[-2:]
    rank = min(rows, columns)
    lower = jnp.tril(factors[..., :, :rank], -1) + jnp.eye(rows, rank, dtype=factors.dtype)
    return lower, jnp.triu(factors[..., :rank, :])


def _permutation_matrix(permutation, dtype):
    return jax.nn.one_hot(permutation, permutation.shape[-1], dtype=dtype).mT


@lowering("lu_unpack")
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True, out=None):
    matrix = _nothing(out[0])
    if unpack_pivots:
        matrix = _permutation_matrix(_permutation(LU_pivots, LU_data.shape[-2]), LU_data.dtype)
    return matrix, *(_unpack(LU_data) if unpack_data else (_nothing(out[1]), _nothing(out[2])))


@lowering("linalg_lu", on_tpu=_LU_OF_SINGLE_PRECISION)
def lu(A, *, pivot=True):
    _needs_pivots(pivot)
    factors, _, permutation = lax.linalg.lu(A)
    return _permutation_matrix(permutation, A.dtype), *_unpack(factors)


@lowering("linalg_lu_solve")
def lu_solve(LU, pivots, B, *, left=True, adjoint=False):
    if not left:  # X A = B is A^H X^H = B^H
        return _adjoint(lu_solve(LU, pivots, _adjoint(B), adjoint=not adjoint))
    batch = jnp.broadcast_shapes(LU.shape[:-2], B.shape[:-2])
    LU = jnp.broadcast_to(LU, batch + LU.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    permutation = jnp.broadcast_to(_permutation(pivots, LU.shape[-1]), (*batch, LU.shape[-1]))
    lower, upper = _unpack(LU)
    if adjoint:
        half = _solve_triangular(_adjoint(upper), B, False, True, False)
        solution = _solve_triangular(_adjoint(lower), half, True, True, True)
        return jnp.take_along_axis(solution, jnp.argsort(permutation, -1)[..., None], -2)
    permuted = jnp.take_along_axis(B, permutation[..., None], -2)
    return _solve_triangular(upper, _solve_triangular(lower, permuted, False, True, True), True, True, False)


@lowering("linalg_inv_ex", on_tpu=_LU_OF_SINGLE_PRECISION)
def inv_ex(A, *, check_errors=False):
    factors, _, permutation = lax.linalg.lu(A)
    lower, upper = _unpack(factors)
    rows = _permutation_matrix(permutation, A.dtype).mT
    inverse = _solve_triangular(upper, _solve_triangular(lower, rows, False, True, True), True, True, False)
    return inverse, _first_zero_pivot(factors)


# ---- least squares, by the pseudo-inverse: the drivers differ in what they report


@lowering("linalg_lstsq", on_tpu=_SVD_OF_FLOAT32)
def lstsq(self, b, rcond=None, *, driver=None, out):
    if self.shape[-2] > self.shape[-1]:
        raise NotLoweredError("a result that is a part of what LAPACK writes; and its rank decides on shapes")
    return lstsq_over_b(self, b, rcond, driver=driver, out=out)


@lowering("tpu::lstsq_over_b", on_tpu=_SVD_OF_FLOAT32)
def lstsq_over_b(self, b, rcond=None, *, driver=None, out):
    rows, columns = self.shape[-2:]
    is_vector = b.ndim == 1 or (b.ndim == self.ndim - 1 and b.shape == self.shape[:-1])
    right = b[..., None] if is_vector else b
    u, values, vh = jnp.linalg.svd(self, full_matrices=False)
    if rcond is None or driver == "gels":
        rcond = jnp.finfo(values.dtype).eps * max(rows, columns)
    kept = values > rcond * jnp.max(values, -1, keepdims=True, initial=0)
    inverses = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0)
    solution = matmul(_adjoint(vh), inverses[..., None] * matmul(_adjoint(u), right))
    residuals = jnp.sum(jnp.square(jnp.abs(matmul(self, solution) - right)), -2)
    padding = [(0, 0)] * (solution.ndim - 2) + [(0, max(rows, columns) - columns), (0, 0)]
    solution = jnp.pad(solution, padding)
    outputs = (solution[..., 0] if is_vector else solution), residuals, jnp.sum(kept, -1), values
    return tuple(
        value.reshape(spec.shape) if value.size == math.prod(spec.shape) else _nothing(spec)
        for value, spec in zip(outputs, out, strict=True)
    )


# ---- Householder reflections


@lowering("linalg_householder_product")
def householder_product(input, tau):
    return lax.linalg.householder_product(input, tau)


@lowering("geqrf")
def geqrf(self):
    reflectors, tau = jnp.linalg.qr(self, mode="raw")
    return reflectors.mT, tau


@lowering("ormqr")
def ormqr(self, input2, input3, left=True, transpose=False):
    """``input3`` times the product of the reflections that ``self`` and ``input2`` (their scales) hold."""
    order = input3.shape[-2 if left else -1]
    reflectors = self[..., :order]
    missing = [(0, 0)] * (self.ndim - 1) + [(0, order - reflectors.shape[-1])]
    rotation = lax.linalg.householder_product(jnp.pad(reflectors, missing), input2)
    rotation = _adjoint(rotation) if transpose else rotation
    return matmul(rotation, input3) if left else matmul(input3, rotation)


# ---- products


@lowering("linalg_cross")
def cross(self, other, *, dim=-1):
    self, other = jnp.broadcast_arrays(self, other)
    return jnp.cross(self, other, axis=dim)


# The Taylor series of degree 18 is exact to the last digit for matrices of this 1-norm (Bader, Blanes, Casas
# 2019, table 1: 3.01 in single precision, 1.09 in double).
_TAYLOR_DEGREE = 18
_TAYLOR_NORM = {4: 3.01, 8: 1.09}


@lowering("linalg_matrix_exp", promote="opmath")
def matrix_exp(self):
    """The series of the matrix halved until its norm is small, squared as often (scaling and squaring)."""
    if self.size == 0:
        return self
    norm = jnp.max(jnp.sum(jnp.abs(self), -2), -1)
    bound = _TAYLOR_NORM[norm.dtype.itemsize]
    halvings = jnp.where(jnp.isfinite(norm), jnp.ceil(jnp.log2(jnp.maximum(norm / bound, 1))), 0)
    halvings = halvings.astype(jnp.int32)[..., None, None]
    powers = [jnp.broadcast_to(jnp.eye(self.shape[-1], dtype=self.dtype), self.shape)]
    powers.append(self * jnp.exp2(-halvings.astype(norm.dtype)))
    for _ in range(3):
        powers.append(matmul(powers[-1], powers[1]))

    def terms(first):
        """Those of degrees ``first`` to ``first`` + 3, over the matrix to the power of ``first``."""
        degrees = range(first, min(first + 4, _TAYLOR_DEGREE + 1))
        return sum(powers[degree - first] / math.factorial(degree) for degree in degrees)

    result = terms(16)
    for first in (12, 8, 4, 0):
        result = matmul(result, powers[4]) + terms(first)
    return lax.fori_loop(0, jnp.max(halvings), lambda i, m: jnp.where(i < halvings, matmul(m, m), m), result)
