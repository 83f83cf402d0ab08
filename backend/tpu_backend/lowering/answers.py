"""Operators of which it is known without tracing that they are lowered.

Those of `ALWAYS` are lowered whatever PyTorch's meta kernel and `kinds.py` let pass, but for empty tensors.
So no form of theirs is traced when it is first recorded, which takes a few milliseconds.
`reads_precision` holds for float32; other dtypes are compiled again for another precision, too.
`tests/backend/test_answers.py` traces forms of each.
"""

from __future__ import annotations

from typing import NamedTuple


class Answer(NamedTuple):
    """What tracing says of a form."""

    is_lowered: bool
    has_bounds_checks: bool
    reads_precision: bool


# fmt: off
_OPERATORS: dict[Answer, str] = {
    Answer(is_lowered=True, has_bounds_checks=False, reads_precision=False): """
        _foreach_add.List _foreach_add.Scalar _foreach_div.List _foreach_div.Scalar _foreach_mul.List
        _foreach_mul.Scalar _foreach_mul.Tensor _foreach_norm.Scalar _foreach_sqrt _log_softmax
        _log_softmax_backward_data _softmax _softmax_backward_data abs add.Scalar add.Tensor addcdiv addcmul
        amax amin cat clamp cos div.Scalar div.Tensor embedding_dense_backward eq.Scalar eq.Tensor erf exp
        expm1 fill.Scalar ge.Scalar ge.Tensor gelu gt.Scalar gt.Tensor le.Scalar le.Tensor linalg_vector_norm
        log log1p logical_and logical_not lt.Scalar lt.Tensor masked_fill.Scalar maximum mean mean.dim minimum
        mse_loss mse_loss_backward mul.Scalar mul.Tensor native_dropout native_layer_norm ne.Scalar ne.Tensor
        neg nll_loss_backward reciprocal relu rsqrt sigmoid sigmoid_backward silu sin sqrt stack sub.Tensor
        sum sum.dim_IntList tanh tanh_backward threshold_backward tpu::copy tpu_collective::all_gather
        where.self zero
    """,
    Answer(is_lowered=True, has_bounds_checks=False, reads_precision=True): """
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        linear_backward tpu::linear
    """,
    Answer(is_lowered=True, has_bounds_checks=True, reads_precision=False): "embedding nll_loss_forward",
}
# fmt: on

ALWAYS: dict[str, Answer] = {name: answer for answer, names in _OPERATORS.items() for name in names.split()}
