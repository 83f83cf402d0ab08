"""Attention by cuDNN's kernels: what a GPU's program asks for, and, where there is a GPU, its values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from jax import export

from tpu_backend.attention import document_attention
from tpu_backend.lowering import cudnn_attention
from tpu_backend.lowering.platforms import lowering_for

LENGTH = 256


@pytest.mark.parametrize(("has_documents", "name"), [(False, "fmhaSoftmax"), (True, "fmhaScaleBiasSoftmax")])
def test_a_gpus_program_calls_the_kernels(
    has_documents: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention, "_has_kernels", lambda: True)

    def gradients(query: jax.Array, key: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        given = query, key, key, ids if has_documents else None
        with lowering_for("cuda"):
            assert cudnn_attention.fits(*given)
            output, log_sums = cudnn_attention.forward(*given, True, None)
            return cudnn_attention.backward(output, *given, output, log_sums, True, jnp.float64(0.3))

    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((2, 4, LENGTH, 64), jnp.bfloat16),
            ((2, 2, LENGTH, 64), jnp.bfloat16),
            ((2, 1, 1, LENGTH), jnp.int64),
        )
    ]
    targets = [f"__cudnn${name}", f"__cudnn${name}Backward"]
    with jax.enable_x64(True):
        program = export.export(
            jax.jit(gradients),
            platforms=["cuda"],
            disabled_checks=[export.DisabledSafetyCheck.custom_call(each) for each in targets],
        )(*shapes)
    for target in targets:
        assert program.mlir_module().count(f"@{target}(") == 1
    assert [(each.shape, each.dtype) for each in program.out_avals] == [
        (shape.shape, shape.dtype) for shape in (*shapes[:2], shapes[1])
    ]


QUERY, KEY = ((2, 4, LENGTH, 64), "bfloat16"), ((2, 2, LENGTH, 64), "bfloat16")
LONG = 8192 + 2


@pytest.mark.parametrize(
    ("query", "key", "value", "mask"),
    [
        pytest.param(*([((2, 4, LENGTH, 64), "float32")] * 3), None, id="dtype"),
        pytest.param(QUERY, ((2, 2, LENGTH, 64), "float16"), KEY, None, id="dtypes"),
        pytest.param(*([((2, 4, LENGTH, 60), "bfloat16")] * 3), None, id="features"),
        pytest.param(*([((2, 4, LENGTH, 256), "bfloat16")] * 3), None, id="many features"),
        pytest.param(QUERY, KEY, ((2, 2, LENGTH, 32), "bfloat16"), None, id="features of values"),
        pytest.param(((2, 4, 1, 64), "bfloat16"), KEY, KEY, None, id="one query"),
        pytest.param(QUERY, *([((2, 3, LENGTH, 64), "bfloat16")] * 2), None, id="heads"),
        pytest.param(*([((0, 4, LENGTH, 64), "bfloat16")] * 3), None, id="empty"),
        pytest.param(QUERY, KEY, KEY, ((2, 1, LENGTH, LENGTH), "bool"), id="pairs"),
        pytest.param(QUERY, KEY, KEY, ((2, 1, 1, 2 * LENGTH + 1), "int64"), id="documents of keys"),
        pytest.param(*([((1, 2, 255, 64), "bfloat16")] * 3), ((1, 1, 1, 255), "int64"), id="odd"),
        pytest.param(*([((1, 2, LONG, 64), "bfloat16")] * 3), ((1, 1, 1, LONG), "int64"), id="many pairs"),
    ],
)
def test_what_the_kernels_do_not_compute_is_declined(
    query: Any, key: Any, value: Any, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_attention, "_has_kernels", lambda: True)

    def declined(*given: jax.Array) -> jax.Array:
        with lowering_for("cuda"):
            assert not cudnn_attention.fits(*given[:3], given[3] if mask is not None else None)
        return given[0]

    shapes = [jax.ShapeDtypeStruct(*each) for each in (query, key, value, mask or query)]
    with jax.enable_x64(True):
        jax.eval_shape(declined, *shapes)


@pytest.mark.skipif(torch.tpu.get_device_properties().platform != "cuda", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize(("has_documents", "window"), [(False, None), (True, None), (True, 100)])
def test_values_and_gradients_on_a_gpu(has_documents: bool, window: int | None, scale: float | None) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 512, 64, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    ids = (torch.arange(512) // 200).expand(2, -1)
    place = torch.arange(512)
    seen = place[:, None] >= place
    if has_documents:
        seen = seen & (ids[0][:, None] == ids[0])
    if window is not None:
        seen = seen & (place[:, None] - place < window)
    exact = [each.double().requires_grad_() for each in tensors]
    query, key, value = exact[0], *(each.repeat_interleave(4, 1) for each in exact[1:])
    scores = query @ key.mT * (scale or 1 / math.sqrt(64))
    expected = scores.masked_fill(~seen, -math.inf).softmax(-1) @ value
    ours = [each.to("tpu").requires_grad_() for each in tensors]
    if has_documents:
        output = document_attention(*ours, ids.to("tpu"), scale=scale, window=window)
    else:
        output = F.scaled_dot_product_attention(*ours, is_causal=True, scale=scale, enable_gqa=True)
    grad = torch.randn_like(expected).bfloat16()
    output.backward(grad.to("tpu"))
    expected.backward(grad.double())
    gradients = zip([each.grad for each in ours], [each.grad for each in exact])
    for found, right in [(output, expected), *gradients]:
        assert found is not None
        assert right is not None
        assert torch.linalg.norm(found.cpu().double() - right) < 0.01 * torch.linalg.norm(right)
