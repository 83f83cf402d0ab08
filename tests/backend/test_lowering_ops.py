"""Operators of PyTorch's database against its CPU kernels, forward and backward (full sweep: the harness)."""

import pytest
import torch

from tests.backend.lowering_harness import check_op, op_db

_OPERATORS = {
    torch.float32: """
        add sub rsub mul div pow exp log sqrt rsqrt tanh sigmoid abs sign clamp lerp addcmul addcdiv where
        masked_fill eq lt isnan
        logical_and maximum fmod remainder floor_divide nan_to_num
        sum mean prod amax max argmax var std_mean linalg.vector_norm logsumexp cumsum any
        softmax log_softmax nn.functional.layer_norm nn.functional.rms_norm nn.functional.group_norm
        nn.functional.batch_norm
        mm bmm addmm baddbmm addmv dot mv matmul nn.functional.linear
        nn.functional.embedding index_put gather scatter scatter_add scatter_reduce index_select index_add
        masked_scatter take_along_dim __getitem__
        cat stack flip roll repeat tril sort topk nn.functional.pad
        nn.functional.gelu nn.functional.silu nn.functional.relu nn.functional.softplus nn.functional.glu
        nn.functional.elu nn.functional.hardswish
        nn.functional.cross_entropy nn.functional.nll_loss nn.functional.mse_loss nn.functional.huber_loss
        nn.functional.binary_cross_entropy_with_logits nn.functional.kl_div
        nn.functional.conv2d nn.functional.conv_transpose2d nn.functional.max_pool2d nn.functional.avg_pool2d
        nn.functional.adaptive_avg_pool2d nn.functional.interpolate
        linalg.cholesky_ex linalg.solve_triangular linalg.lstsq geqrf ormqr cdist fft.rfft
        _segment_reduce histogram histogramdd histc polygamma
        nn.functional.grid_sample _upsample_bilinear2d_aa nn.functional.multi_margin_loss
    """,
    torch.bfloat16: """
        add mul div exp sum mean softmax log_softmax mm addmm nn.functional.layer_norm nn.functional.gelu
        nn.functional.cross_entropy nn.functional.embedding cumsum index_add scatter_add lerp where
    """,
    torch.int64: """
        add sub mul div floor_divide remainder fmod pow sum prod cumsum max argmax clamp eq bitwise_and
        bitwise_left_shift gather scatter_add index_put sort cat where masked_fill abs sign
    """,
    torch.bool: "add mul logical_not bitwise_or bitwise_xor any all sum cat where eq index_add",
}
_CASES = [
    pytest.param(op, dtype, id=f"{op.name}{'-' * bool(op.variant_test_name)}{op.variant_test_name}-{dtype}")
    for dtype, names in _OPERATORS.items()
    for op in op_db
    if op.name in names.split() and dtype in op.supported_dtypes("cpu")
]


def test_the_listed_operators_exist() -> None:
    known = {op.name for op in op_db}
    assert [name for names in _OPERATORS.values() for name in names.split() if name not in known] == []


@pytest.mark.parametrize(("op", "dtype"), _CASES)
def test_lowerings_agree_with_cpu(op, dtype: torch.dtype) -> None:
    checks = check_op(op, dtype, num_samples=1)
    assert checks.failures == []
    assert checks.checked


_NORMS_OF_EACH_DEGREE = (1e-8, 1e-4, 1e-2, 0.2, 1.0, 2.9, 30.0)


@pytest.mark.parametrize("shape", [(4, 4), (1, 9, 9), (3, 5, 5)])
@pytest.mark.parametrize("norm", _NORMS_OF_EACH_DEGREE)
def test_matrix_exp_is_the_cpus_at_norms_of_every_degree(shape: tuple[int, ...], norm: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    matrix *= norm / torch.linalg.matrix_norm(matrix, 1).max()
    expected = torch.linalg.matrix_exp(matrix)
    scale = expected.abs().max()
    assert (torch.linalg.matrix_exp(matrix.to("tpu")).cpu() - expected).abs().max() <= 1e-5 * scale


def test_matrix_exp_of_what_is_not_finite_is_nan_as_on_the_cpu() -> None:
    for value in (float("nan"), float("inf")):
        matrix = torch.eye(3)
        matrix[0, 1] = value
        for A in (matrix, torch.stack([matrix, torch.eye(3)])):
            expected = torch.linalg.matrix_exp(A)
            torch.testing.assert_close(torch.linalg.matrix_exp(A.to("tpu")).cpu(), expected, equal_nan=True)
