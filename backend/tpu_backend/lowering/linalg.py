"""Matrix factorisations, inverses and triangular solves.

``info`` outputs report failure as LAPACK would (non-zero), seen from NaN in the result. Determinants and
``linalg.solve`` are made of these in composite/linalg.py.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tpu_backend.lowering import lapack
from tpu_backend.lowering.bounds import require_in_range
from tpu_backend.lowering.matmul import batched_matmul, matmul, scaled
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
    factor = lapack.cholesky(_adjoint(self) if upper else self)
    return _adjoint(factor) if upper else factor, _info(factor)


@lowering("cholesky")
def cholesky(self, upper=False):
    return cholesky_ex(self, upper=upper)[0]


@lowering("linalg_qr")
def qr(A, mode="reduced", out=None):
    if mode == "r":
        return jnp.zeros(out[0].shape, out[0].dtype), lapack.qr(A, mode="r")
    return lapack.qr(A, mode=mode)


@lowering("_linalg_eigh")
def eigh(A, UPLO="L", compute_v=True, out=None):
    if compute_v:
        return lapack.eigh(A, UPLO.upper())
    return lapack.eigvalsh(A, UPLO.upper()), _nothing(out[1])


def _nothing(spec):
    return jnp.zeros(spec.shape, spec.dtype)


def _require_finite(A):
    """BoundsCheck it in the words of PyTorch's CPU, which names the first matrix of a batch that is not."""
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
        return lapack.svd(A, full_matrices=full_matrices)
    return _nothing(out[0]), lapack.svd(A, compute_uv=False), _nothing(out[2])


# ---- triangular systems


def _solve_triangular(A, B, upper, left, unitriangular, transpose=False):
    batch = jnp.broadcast_shapes(A.shape[:-2], B.shape[:-2])
    A = jnp.broadcast_to(A, batch + A.shape[-2:])
    B = jnp.broadcast_to(B, batch + B.shape[-2:])
    return lapack.triangular_solve(
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
    factors, pivots, _ = lapack.lu(A)
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
    factors, _, permutation = lapack.lu(A)
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
    factors, _, permutation = lapack.lu(A)
    lower, upper = _unpack(factors)
    rows = _permutation_matrix(permutation, A.dtype).mT
    inverse = _solve_triangular(upper, _solve_triangular(lower, rows, False, True, True), True, True, False)
    return inverse, _first_zero_pivot(factors)


# ---- least squares: LAPACK's driver gels wants full rank and takes a QR factorisation; the others are the
# pseudo-inverse, and differ in what they report


def _solution_of_full_rank(A, right):
    if A.shape[-2] >= A.shape[-1]:
        q, r = lapack.qr(A)
        return _solve_triangular(r, matmul(_adjoint(q), right), True, True, False)
    q, r = lapack.qr(_adjoint(A))
    return matmul(q, _solve_triangular(_adjoint(r), right, False, True, False))


def _solution_of_least_norm(A, right, rcond):
    """With it, A's rank and singular values."""
    u, values, vh = lapack.svd(A, full_matrices=False)
    if rcond is None:
        rcond = jnp.finfo(values.dtype).eps * max(A.shape[-2:])
    kept = values > rcond * jnp.max(values, -1, keepdims=True, initial=0)
    inverses = jnp.where(kept, 1 / jnp.where(kept, values, 1), 0)

    def solve(right):
        return matmul(_adjoint(vh), inverses[..., None] * matmul(_adjoint(u), right))

    solution = solve(right)
    solution = solution + solve(right - matmul(A, solution))  # the last digits that the factors lack
    return solution, jnp.sum(kept, -1), values


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
    if driver == "gels":
        solution, rank, values = _solution_of_full_rank(self, right), None, None
    else:
        solution, rank, values = _solution_of_least_norm(self, right, rcond)
    residuals = jnp.sum(jnp.square(jnp.abs(matmul(self, solution) - right)), -2)
    padding = [(0, 0)] * (solution.ndim - 2) + [(0, max(rows, columns) - columns), (0, 0)]
    solution = jnp.pad(solution, padding)
    outputs = (solution[..., 0] if is_vector else solution), residuals, rank, values
    return tuple(
        _nothing(spec) if value is None or value.size != math.prod(spec.shape) else value.reshape(spec.shape)
        for value, spec in zip(outputs, out, strict=True)
    )


# ---- Householder reflections


@lowering("linalg_householder_product")
def householder_product(input, tau):
    return lapack.householder_product(input, tau)


@lowering("geqrf")
def geqrf(self):
    reflectors, tau = lapack.qr(self, mode="raw")
    return reflectors.mT, tau


@lowering("ormqr")
def ormqr(self, input2, input3, left=True, transpose=False):
    """``input3`` times the product of the reflections that ``self`` and ``input2`` (their scales) hold."""
    order = input3.shape[-2 if left else -1]
    reflectors = self[..., :order]
    missing = [(0, 0)] * (self.ndim - 1) + [(0, order - reflectors.shape[-1])]
    rotation = lapack.householder_product(jnp.pad(reflectors, missing), input2)
    rotation = _adjoint(rotation) if transpose else rotation
    return matmul(rotation, input3) if left else matmul(input3, rotation)


# ---- products


@lowering("linalg_cross", one_dtype=("self", "other"))
def cross(self, other, *, dim=-1):
    self, other = jnp.broadcast_arrays(self, other)
    return jnp.cross(self, other, axis=dim)


# ---- the matrix exponential

# Polynomials of the Taylor series by few products, and the 1-norm up to which each is exact to the last
# digit, by bytes of a real number: Bader, Blanes, Casas, "Computing the Matrix Exponential with an Optimized
# Taylor Polynomial Approximation", Mathematics 2019, 7, 1174. PyTorch's CPU kernel
# (ATen/native/LinearAlgebra.cpp) takes the same ones, and adds the terms in this order.
_TAYLOR_NORMS = {
    4: (
        1.192092800768788e-07,  # degree 1
        5.978858893805233e-04,  # 2
        5.116619363445086e-02,  # 4
        5.800524627688768e-01,  # 8
        1.461661507209034,  # 12
        3.010066362817634,  # 18
    ),
    8: (
        2.220446049250313e-16,
        2.580956802971767e-08,
        3.397168839976962e-04,
        4.991228871115323e-02,
        2.996158913811580e-01,
        1.090863719290036,
    ),
}

# Rows: the coefficients of I, A, A^2, A^3 and, of degree 18, A^6.
_DEGREE_12 = (
    (9.0198e-16, 0.46932117595418237389, -0.20099424927047284052, -0.04623946134063071740),
    (5.31597895759871264183, 1.19926790417132231573, 0.01179296240992997031, 0.01108844528519167989),
    (0.18188869982170434744, 0.05502798439925399070, 0.09351590770535414968, 0.00610700528898058230),
    (-2.0861320e-13, -0.13181061013830184015, -0.02027855540589259079, -0.00675951846863086359),
)
_DEGREE_18 = (
    (0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04),
    (
        0,
        3.97849749499645077844e-01,
        1.36783778460411720168,
        4.98289622525382669416e-01,
        -6.37898194594723280150e-04,
    ),
    (
        -1.09676396052962061844e01,
        1.68015813878906206114,
        5.71779846478865511061e-02,
        -6.98210122488052056106e-03,
        3.34975017086070470649e-05,
    ),
    (
        -9.04316832390810593223e-02,
        -6.76404519071381882256e-02,
        6.75961301770459654925e-02,
        2.95552570429315521194e-02,
        -1.39180257516060693404e-05,
    ),
    (0, 0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)


def _sum_of(matrices, factors):
    terms = (scaled(matrix, factor) for matrix, factor in zip(matrices, factors) if factor != 0)
    return functools.reduce(jnp.add, terms)


def _identity_like(A):
    return jnp.broadcast_to(jnp.eye(A.shape[-1], dtype=A.dtype), A.shape)


def _taylor_1(A):
    return _identity_like(A) + A


def _taylor_2(A):
    return _identity_like(A) + A + batched_matmul(A, A) / 2


def _taylor_4(A):
    identity, square = _identity_like(A), batched_matmul(A, A)
    return identity + A + batched_matmul(square, _sum_of((identity, A, square), (1 / 2, 1 / 6, 1 / 24)))


def _taylor_8(A):
    identity, A2 = _identity_like(A), batched_matmul(A, A)
    root, x3 = (float(np.asarray(value, A.real.dtype)) for value in (math.sqrt(177), 2 / 3))
    A4 = batched_matmul(A2, _sum_of((A, A2), (x3 * (1 + root) / 88, x3 * (1 + root) / 352)))
    factors = (
        (-271 + 29 * root) / (315 * x3),
        (-11 + 11 * root) / (1260 * x3),
        (-99 + 11 * root) / (5040 * x3),
        (89 - root) / (5040 * x3),
    )
    A8 = batched_matmul(_sum_of((A2, A4), (x3, 1)), _sum_of((identity, A, A2, A4), factors))
    return _sum_of((identity, A, A2, A8), (1, 1, (857 - 58 * root) / 630, 1))


def _taylor_12(A):
    A2 = batched_matmul(A, A)
    powers = _identity_like(A), A, A2, batched_matmul(A, A2)
    B = [_sum_of(powers, factors) for factors in _DEGREE_12]
    A6 = B[2] + batched_matmul(B[3], B[3])
    return B[0] + batched_matmul(B[1] + A6, A6)


def _taylor_18(A):
    A2 = batched_matmul(A, A)
    A3 = batched_matmul(A, A2)
    powers = _identity_like(A), A, A2, A3, batched_matmul(A3, A3)
    B = [_sum_of(powers, factors) for factors in _DEGREE_18]
    A9 = B[3] + batched_matmul(B[0], B[4])
    return B[1] + batched_matmul(B[2] + A9, A9)


def _scaled_and_squared(A, norm):
    """The exponential of the matrix halved until its norm is small, squared as often."""
    halvings = jnp.maximum(jnp.ceil(jnp.log2(norm / _TAYLOR_NORMS[norm.dtype.itemsize][-1])), 0)
    count = jnp.where(jnp.isfinite(norm), halvings, 0).astype(jnp.int32)
    # From a table: XLA's exp2 is not exact. An infinite norm leaves zeros, NaN leaves nothing, as in PyTorch.
    powers = jnp.asarray(np.ldexp(1.0, -np.arange(jnp.finfo(norm.dtype).maxexp)), norm.dtype)
    scale = jnp.where(jnp.isfinite(norm), powers[count], 1 / norm)
    result = _taylor_18(A * scale[..., None, None])
    count = count[..., None, None]
    return lax.fori_loop(
        0, jnp.max(count), lambda i, m: jnp.where(i < count, batched_matmul(m, m), m), result
    )


@lowering("linalg_matrix_exp", promote="opmath")
def matrix_exp(self):
    if self.size == 0:
        return self
    if self.shape[-1] == 1:
        return jnp.exp(self)
    norm = jnp.max(jnp.sum(jnp.abs(self), -2), -1)
    if norm.size > 1:  # the highest degree is exact for all of a batch, as PyTorch has it
        return _scaled_and_squared(self, norm)
    exact_below = jnp.asarray(_TAYLOR_NORMS[norm.dtype.itemsize][:-1], norm.dtype)
    degree = jnp.sum(~(norm.reshape(()) <= exact_below))  # NaN goes to the last
    forms = (_taylor_1, _taylor_2, _taylor_4, _taylor_8, _taylor_12)
    return lax.switch(degree, (*forms, lambda A: _scaled_and_squared(A, norm)), self)
