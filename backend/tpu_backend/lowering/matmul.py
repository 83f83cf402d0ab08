"""Matrix products.

Precision, stated once: float32 products follow ``torch.get_float32_matmul_precision()`` ("highest", "high" or
"medium" map to XLA's HIGHEST, HIGH and DEFAULT); 16-bit floats multiply as they are and accumulate in
float32; everything else is exact. On a TPU a bfloat16 product is rounded before a bias is added. The setting
in force when a product is recorded is part of its program.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_backend.lowering import grouped_sums
from tpu_backend.lowering.few_numbers import are_few, scalar_product
from tpu_backend.lowering.registry import (
    TABLE,
    CannotCompile,
    Fit,
    NotLoweredError,
    apply,
    is_16_bit,
    lowering,
    opmath,
    stored,
)
from tpu_backend.lowering.settings import float32_matmul_precision

NO_INT64_PRODUCTS = CannotCompile(
    "UNIMPLEMENTED: rewriting a dot or convolution of 64-bit integers", frozenset({"int64", "uint64"})
)

_FLOAT32_PRECISION = {
    "highest": lax.Precision.HIGHEST,
    "high": lax.Precision.HIGH,
    "medium": lax.Precision.DEFAULT,
}


def product_precision(dtype: Any) -> lax.Precision:
    """The XLA precision of a matrix product or convolution whose operands have this dtype."""
    if jnp.dtype(dtype) in (jnp.float32, jnp.complex64):
        return _FLOAT32_PRECISION[float32_matmul_precision()]
    return lax.Precision.DEFAULT


def matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """``left @ right`` with numpy's batching, in the accumulation dtype (float32 for 16-bit floats)."""
    if left.dtype != right.dtype:
        raise NotLoweredError("a product of two dtypes: PyTorch refuses it, in its own words on the CPU")
    product = functools.partial(
        jnp.matmul, precision=product_precision(left.dtype), preferred_element_type=opmath(left.dtype)
    )
    if not jnp.issubdtype(left.dtype, jnp.complexfloating):
        return product(left, right)

    def in_real_products(left, right):  # as in MKL; XLA:CPU's own product takes twice the time, and errs more
        real = jnp.matmul(left.real, right.real) - jnp.matmul(left.imag, right.imag)
        return lax.complex(real, jnp.matmul(left.real, right.imag) + jnp.matmul(left.imag, right.real))

    return lax.platform_dependent(left, right, cpu=in_real_products, default=product)


# Below this many multiplications PyTorch's CPU kernel adds the terms of a batch's products one by one, each
# rounded first. Such matrices would not fill a matrix unit either. More terms are left to XLA: each is an
# operation of its own.
_FEW_MULTIPLICATIONS = 400
_FEW_TERMS = 16


def batched_matmul(left: jax.Array, right: jax.Array) -> jax.Array:
    """``matmul`` of (..., m, k) and (..., k, n) in batches of one shape, as in ``bmm``."""
    rows, terms, columns = *left.shape[-2:], right.shape[-1]
    is_small = are_few(rows * terms * columns, _FEW_MULTIPLICATIONS - 1) and terms <= _FEW_TERMS
    is_wide = jnp.issubdtype(left.dtype, jnp.inexact) and left.dtype.itemsize >= 4
    if not (is_small and is_wide and left.dtype == right.dtype):
        return matmul(left, right)
    product_precision(left.dtype)  # read at each size, so that a tape that grows differs in numbers alone
    products = (left[..., :, k, None] * right[..., None, k, :] for k in range(terms))
    return functools.reduce(jnp.add, products)


def scaled(value: jax.Array, factor: Any) -> jax.Array:
    """``factor * value`` in value's dtype; a factor known to be 1 costs nothing."""
    if isinstance(factor, (int, float)) and factor == 1:
        return value
    return value * jnp.asarray(factor, value.dtype)


def _ignores_product(self: jax.Array, product: jax.Array) -> bool:
    """Whether PyTorch's CPU asks BLAS, which does not look at what is multiplied by 0, be it NaN."""
    is_float = self.dtype in (jnp.float32, jnp.float64) and product.ndim < 3
    return is_float or (product.ndim == 2 and jnp.iscomplexobj(self))


def _add_product(self: jax.Array, product: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    if isinstance(alpha, (int, float)) and alpha == 0 and _ignores_product(self, product):
        product = jnp.zeros_like(product)
    else:
        product = scaled(product, alpha)
    if isinstance(beta, (int, float)) and beta == 0:  # PyTorch: self is ignored, NaN in it does not propagate
        return product
    return scaled(self.astype(product.dtype), beta) + product


def _rounded_product(left: jax.Array, right: jax.Array) -> jax.Array:
    """On a TPU 16-bit products come rounded out of the matrix unit, which adds in float32 all the same.
    Otherwise XLA leaves out the rounding where what follows is in float32, such as the sum with a bias, and
    keeps values in memory twice as large.
    """
    if left.dtype == right.dtype and is_16_bit(left.dtype):
        return jnp.matmul(left, right)
    return batched_matmul(left, right) if left.ndim == right.ndim == 3 else matmul(left, right)


def _product_for_sum(left: jax.Array, right: jax.Array) -> jax.Array:
    """To which a bias is added: float16 would overflow where the sum does not."""
    return matmul(left, right) if left.dtype == jnp.float16 else _rounded_product(left, right)


def _mm_on_tpu(self, mat2):
    return mm(self, mat2) if self.dtype == jnp.int8 else _rounded_product(self, mat2)


@lowering("mm", "bmm", "mv", "_int_mm", on_tpu=NO_INT64_PRODUCTS, on={"tpu": _mm_on_tpu})
def mm(self, mat2):
    if self.dtype == mat2.dtype == jnp.int8:  # _int_mm
        return jnp.matmul(self, mat2, preferred_element_type=jnp.int32)
    return batched_matmul(self, mat2) if self.ndim == 3 else matmul(self, mat2)


def _linear_on_tpu(self, weight, bias=None):
    """Without joining rows, which may copy them: XLA finds a layout for all dims."""
    if bias is None:
        return _rounded_product(self, weight.T)
    product = _product_for_sum(self, weight.T)
    return product + bias.astype(product.dtype)


@lowering("tpu::linear", on={"tpu": _linear_on_tpu})
def linear(self, weight, bias=None):
    product = matmul(self.reshape(-1, self.shape[-1]), weight.T)
    if bias is not None:
        product = bias.astype(product.dtype) + product
    return product.reshape(*self.shape[:-1], -1)


def _linear_backward_on_tpu(self, grad_output, weight, output_mask, *, out):
    """Sums over all leading dims, without joining them."""
    if grad_output.ndim < 2:
        return linear_backward(self, grad_output, weight, output_mask, out=out)
    leading = tuple(range(grad_output.ndim - 1))
    grad_input = _rounded_product(grad_output, weight) if output_mask[0] else None
    grad_weight = grad_bias = None
    if output_mask[1]:
        dims = ((leading, leading), ((), ()))
        grad_weight = lax.dot_general(
            grad_output, self, dims, product_precision(self.dtype), preferred_element_type=self.dtype
        )
    if output_mask[2]:
        (grad_bias,) = apply(TABLE["sum.dim_IntList"], [grad_output, list(leading)], {}, (out[2],))
    return grad_input, grad_weight, grad_bias


@lowering("linear_backward", on={"tpu": _linear_backward_on_tpu})
def linear_backward(self, grad_output, weight, output_mask, *, out):
    """The two products and the sum that PyTorch's composite makes of it, rounded as they are. What no wanted
    gradient needs, `self` or `weight`, is None.
    """
    rows = grad_output.reshape(-1, grad_output.shape[-1])

    def product(left, right, spec):
        shaped = jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), spec.dtype)
        return apply(TABLE["mm"], [left, right], {}, (shaped,))[0].reshape(spec.shape)

    grad_input = product(rows, weight, out[0]) if output_mask[0] else None
    grad_weight = product(rows.T, self.reshape(-1, self.shape[-1]), out[1]) if output_mask[1] else None
    grad_bias = apply(TABLE["sum.dim_IntList"], [rows, [0]], {}, (out[2],))[0] if output_mask[2] else None
    return grad_input, grad_weight, grad_bias


@lowering("mm.dtype", "bmm.dtype")
def mm_dtype(self, mat2, out_dtype):
    return matmul(self, mat2)


@lowering("dot", on_tpu=NO_INT64_PRODUCTS)
def dot(self, tensor):
    return scalar_product(self, tensor, matmul)


@lowering("vdot", on_tpu=NO_INT64_PRODUCTS)
def vdot(self, other):
    return matmul(self.conj(), other)


_IN_OPMATH: dict[str, Fit] = {"beta": "opmath", "alpha": "opmath"}
_IN_RESULT: dict[str, Fit] = {"beta": "result", "alpha": "result"}


def _addmm_on_tpu(self, mat1, mat2, *, beta=1, alpha=1, out=None):
    is_sum = all(isinstance(factor, (int, float)) and factor == 1 for factor in (beta, alpha))
    if not (is_sum and mat1.dtype == mat2.dtype == jnp.bfloat16):
        return addmm(self, mat1, mat2, beta=beta, alpha=alpha, out=out)
    return jnp.broadcast_to(jnp.asarray(self, mat1.dtype) + _product_for_sum(mat1, mat2), out[0].shape)


@lowering(
    "addmm",
    on_tpu=NO_INT64_PRODUCTS,
    one_dtype=("self", "mat1", "mat2"),
    fits=_IN_OPMATH,
    on={"tpu": _addmm_on_tpu},
)
@lowering(
    "baddbmm",
    on_tpu=NO_INT64_PRODUCTS,
    one_dtype=("self", "batch1", "batch2"),
    fits=_IN_OPMATH,
    on={"tpu": _addmm_on_tpu},
)
@lowering("addmv", on_tpu=NO_INT64_PRODUCTS, one_dtype=("self", "mat", "vec"), fits=_IN_RESULT)
def addmm(self, mat1, mat2, *, beta=1, alpha=1, out=None):
    self = jnp.asarray(self, mat1.dtype)  # a 0-d complex tensor of the host is a number here
    product = batched_matmul(mat1, mat2) if mat1.ndim == 3 else matmul(mat1, mat2)
    return jnp.broadcast_to(_add_product(self, product, beta, alpha), out[0].shape)


@lowering("addmm.dtype")
def addmm_dtype(self, mat1, mat2, out_dtype, *, beta=1, alpha=1):
    return _add_product(self, matmul(mat1, mat2), beta, alpha)


@lowering("_addmm_activation", one_dtype=("self", "mat1", "mat2"))
def addmm_activation(self, mat1, mat2, *, beta=1, alpha=1, use_gelu=False):
    result = _add_product(self, matmul(mat1, mat2), beta, alpha)
    return jax.nn.gelu(result, approximate=True) if use_gelu else jnp.maximum(result, 0)


@lowering("addbmm", on_tpu=NO_INT64_PRODUCTS, one_dtype=("self", "batch1", "batch2"), fits=_IN_OPMATH)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    product = jnp.einsum(
        "bij,bjk->ik",
        batch1,
        batch2,
        precision=product_precision(batch1.dtype),
        preferred_element_type=opmath(batch1.dtype),
    )
    return _add_product(self, product, beta, alpha)


@lowering("addr", promote="result", fits=_IN_RESULT)
def addr(self, vec1, vec2, *, beta=1, alpha=1, out):
    dtype = out[0].dtype
    beta, alpha = (
        factor if isinstance(factor, (int, float)) else stored(factor, dtype) for factor in (beta, alpha)
    )
    product = stored(stored(scaled(vec1, alpha), dtype)[:, None] * vec2[None, :], dtype)
    if isinstance(beta, (int, float)) and beta == 0:
        return product
    return stored(scaled(self, beta), dtype) + product


@lowering("_grouped_mm")
def grouped_mm(self, mat2, offs=None, bias=None, out_dtype=None, *, out=None):
    """``offs`` (G,) are the ends of G groups of rows, of columns, or of what is summed over.

    (M, K) x (G, K, N) gives (M, N); (G, M, K) x (K, N) gives (M, N); (M, K) x (K, N) gives (G, M, N). What is
    behind the last group is zero, where PyTorch leaves it undefined.
    """
    if bias is not None:
        raise NotLoweredError(
            "grouped products with a bias: PyTorch refuses them, in its own words on the CPU"
        )
    if self.ndim == mat2.ndim == 3:
        return matmul(self, mat2)
    sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype))
    if self.ndim == 3:
        return _ragged_dot(mat2.T, self.swapaxes(1, 2), sizes, 0, out[0].dtype).T
    if mat2.ndim == 2 and grouped_sums.fits(self.T, mat2, sizes):
        return grouped_sums.grouped_sums(self.T, mat2, sizes, out[0].dtype)
    return _ragged_dot(self, mat2, sizes, 0 if mat2.ndim == 3 else 1, out[0].dtype)


def _ragged_dot(
    left: jax.Array, right: jax.Array, sizes: jax.Array, ragged_dim: int, dtype: Any
) -> jax.Array:
    """Groups of rows of `left` (0), each with its own `right`, or groups of what is summed over (1).

    16-bit products are asked for as such, not in float32: they accumulate in float32 all the same, and XLA's
    CPU cannot run the others ("Unsupported element type for DotThunk: BF16 x BF16 = F32").
    """
    contracted = (1, 1) if right.ndim == 3 else (1, 0)
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([contracted[0]], [contracted[1]]), ([], [])),
        lhs_ragged_dimensions=[ragged_dim],
        rhs_group_dimensions=[0] if right.ndim == 3 else [],
    )
    return lax.ragged_dot_general(
        left,
        right,
        sizes,
        dims,
        precision=product_precision(left.dtype),
        preferred_element_type=dtype,
    )
