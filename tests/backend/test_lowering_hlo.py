"""The programs that lowerings make are as lean as hand-written JAX."""

import re

import jax
import jax.numpy as jnp
import torch

from tpu_backend.lowering import TABLE, apply


def text(
    name: str, args: list, out_shape: tuple[int, ...], out_dtype: object = jnp.float32, **kwargs: object
) -> str:
    """The StableHLO of one lowering; None among the arguments stays None."""
    out = (jax.ShapeDtypeStruct(out_shape, out_dtype),)
    with jax.enable_x64(True):
        arrays = [a for a in args if isinstance(a, jax.ShapeDtypeStruct)]

        def run(*values):
            values = iter(values)
            filled = [next(values) if isinstance(a, jax.ShapeDtypeStruct) else a for a in args]
            return apply(TABLE[name], filled, kwargs, out)

        return jax.jit(run).lower(*arrays).as_text()


def shaped(*shape: int, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def operations(program: str) -> list[str]:
    return [name for name in re.findall(r"(?<!#)stablehlo\.(\w+)", program) if name != "constant"]


def test_mm_is_one_dot() -> None:
    assert operations(text("mm", [shaped(4, 8), shaped(8, 3)], (4, 3))) == ["dot_general"]


def test_mm_of_bfloat16_multiplies_bfloat16_and_accumulates_float32() -> None:
    program = text(
        "mm", [shaped(4, 8, dtype=jnp.bfloat16), shaped(8, 3, dtype=jnp.bfloat16)], (4, 3), jnp.bfloat16
    )
    assert operations(program) == ["dot_general", "convert"]
    assert "(tensor<4x8xbf16>, tensor<8x3xbf16>) -> tensor<4x3xf32>" in program


def test_addmm_with_unit_factors_is_a_dot_and_an_add() -> None:
    program = text("addmm", [shaped(3), shaped(4, 8), shaped(8, 3)], (4, 3), beta=1, alpha=1)
    assert set(operations(program)) == {"dot_general", "broadcast_in_dim", "add"}


def test_float32_products_follow_torchs_precision_setting() -> None:
    args = ([shaped(4, 8), shaped(8, 3)], (4, 3))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        assert "HIGHEST" in text("mm", *args)
        torch.set_float32_matmul_precision("medium")
        assert "HIGHEST" not in text("mm", *args)
    finally:
        torch.set_float32_matmul_precision(before)


def test_embedding_is_one_gather_and_its_gradient_one_scatter() -> None:
    tokens = shaped(8, 128, dtype="int64")
    forward = text("embedding", [shaped(4096, 64), tokens, -1, False, False], (8, 128, 64))
    assert operations(forward).count("gather") == 1
    assert "select" not in operations(forward)
    backward = text("embedding_dense_backward", [shaped(8, 128, 64), tokens, 4096, -1, False], (4096, 64))
    assert operations(backward).count("scatter") == 1
    assert "select" not in operations(backward)


def test_a_16_bit_gradient_of_an_embedding_needs_no_table_of_float32() -> None:
    rows = shaped(8, 128, 64, dtype=jnp.bfloat16)
    args = [rows, shaped(8, 128, dtype="int64"), 4096, -1, False]
    program = text("embedding_dense_backward", args, (4096, 64), jnp.bfloat16)
    assert "4096x64xbf16" in program
    assert "4096x64xf32" not in program
    few = text("embedding_dense_backward", [rows, args[1], 2, -1, False], (2, 64), jnp.bfloat16)
    assert "sort" not in operations(few)  # a table of a few rows is the smaller one


def test_nll_loss_backward_is_a_select_over_the_logits() -> None:
    args = [shaped(), shaped(1024, 4096), shaped(1024, dtype="int64"), None, 1, -100, shaped()]
    program = text("nll_loss_backward", args, (1024, 4096))
    assert "scatter" not in operations(program)
    assert len(re.findall(r"= stablehlo\.multiply .*4096x", program)) == 0


def test_runtime_scalars_do_not_widen_float32_arithmetic() -> None:
    number = shaped(dtype="float64")
    cases = {
        "add.Tensor": ([shaped(8), shaped(8)], {"alpha": number}),
        "mul.Scalar": ([shaped(8), number], {}),
        "lerp.Scalar": ([shaped(8), shaped(8), number], {}),
        "masked_fill.Scalar": ([shaped(8), shaped(8, dtype=bool), number], {}),
        "fill.Scalar": ([shaped(8), number], {}),
    }
    for name, (args, _) in cases.items():
        assert "tensor<8xf64>" not in text(name, args, (8,)), name


def test_sums_of_bfloat16_accumulate_in_float32() -> None:
    program = text(
        "sum.dim_IntList", [shaped(4, 8, dtype=jnp.bfloat16), [1], False], (4,), jnp.bfloat16, dtype=None
    )
    assert "tensor<4x8xf32>" in program
