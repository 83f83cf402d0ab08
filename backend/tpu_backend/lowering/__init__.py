"""ATen to JAX: importing this package fills ``registry.TABLE``, one module a family of operators."""

from tpu_backend.lowering import (  # noqa: F401
    activation,
    assertions,
    attention,
    bessel,
    collectives,
    convolution,
    copy,
    ctc,
    data_dependent,
    distance,
    embedding_bag,
    factory,
    fractional_pooling,
    grid_sampling,
    histogram,
    indexing,
    jagged,
    linalg,
    linear_cross_entropy,
    loss,
    matmul,
    normalization,
    optim,
    pointwise,
    polynomials,
    pooling,
    random,
    recurrent,
    reduction,
    resampling,
    segment_reduce,
    shape,
    sorting,
    sparse_indices,
    special,
    spectral,
)

from tpu_backend.lowering import foreach  # noqa: F401  isort: skip  (built from the entries above)
from tpu_backend.lowering.names import functional_name, recordable_overloads
from tpu_backend.lowering.registry import TABLE, CannotCompile, Lowering, NotLoweredError, apply

__all__ = [
    "TABLE",
    "CannotCompile",
    "Lowering",
    "NotLoweredError",
    "apply",
    "functional_name",
    "recordable_overloads",
]
