"""Attention by kernels for a TPU, in Pallas' interpreter on the CPU: the values of all scores in memory."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_backend import attention
from tpu_backend.lowering import blocked_attention, splash_attention
from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.lowering.registry import TABLE, apply

LENGTH = 512


def _arrays(length: int, batch: int, features: int, of_values: int = 0) -> list[jax.Array]:
    """Query, key, value and the gradient of the results. Values have as many features unless it is said."""
    random = np.random.default_rng(0)
    sizes = zip((4, 2, 2, 4), (features, features, of_values or features, of_values or features))
    return [
        jnp.asarray(random.normal(size=(batch, heads, length, size)), jnp.bfloat16) for heads, size in sizes
    ]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter computes in little time. The rule stays."""
    for module in (attention, splash_attention):
        monkeypatch.setattr(module, "BLOCKS", (256, 128))
    monkeypatch.setattr(splash_attention, "COMPUTED", 128)


@pytest.mark.parametrize(
    ("is_causal", "has_documents", "batch", "features", "length"),
    [
        (True, True, 2, (64,), LENGTH),
        (True, False, 1, (192, 128), LENGTH),  # as latent attention has them
        (False, True, 1, (128,), LENGTH),
        (False, False, 2, (64, 96), LENGTH),
        (True, True, 2, (64,), LENGTH - 100),  # padded
        (True, False, 1, (64,), LENGTH - 100),
        (False, True, 1, (64,), LENGTH - 1),
        (False, False, 2, (64,), LENGTH - 100),
    ],
)
def test_values_and_gradients_are_those_of_all_scores(
    is_causal: bool, has_documents: bool, batch: int, features: tuple[int, ...], length: int
) -> None:
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        query, key, value, grad = _arrays(length, batch, *features)
        ids = jnp.asarray(np.random.default_rng(1).integers(0, 5, (batch, length)))
        documents = jnp.sort(ids, 1)[:, None, None, :] if has_documents else None
        factor = jnp.float32(0.3)
        output, log_sums = splash_attention.forward(
            query, key, value, documents, is_causal, factor, interpret=True
        )
        found = splash_attention.backward(
            grad, query, key, value, documents, output, log_sums, is_causal, factor, interpret=True
        )
        wide = [each.astype(jnp.float32) for each in (query, key, value, grad)]
        exact, exact_sums = blocked_attention.forward(*wide[:3], documents, is_causal, factor)
        gradients = blocked_attention.backward(
            wide[3], *wide[:3], documents, exact, exact_sums, is_causal, factor
        )
    assert output.dtype == jnp.bfloat16
    assert output.shape == query.shape[:3] + value.shape[3:]
    assert log_sums.dtype == jnp.float32
    np.testing.assert_allclose(log_sums, exact_sums, rtol=1e-2, atol=1e-2)  # the scaled query is rounded
    for ours, theirs in zip((output, *found), (exact, *gradients), strict=True):
        assert np.linalg.norm(ours.astype("float32") - theirs) < 0.01 * np.linalg.norm(theirs)


def test_gradients_of_a_part_of_the_keys_use_the_log_sums_of_all() -> None:
    """As context parallelism asks for them."""
    query, key, value, grad = _arrays(LENGTH, 1, 64)
    wide = [each.astype(jnp.float32) for each in (query, key, value, grad)]
    factor = jnp.float32(0.125)
    output, log_sums = blocked_attention.forward(*wide[:3], None, False, factor)
    expected = blocked_attention.backward(wide[3], *wide[:3], None, output, log_sums, False, factor)
    half = slice(0, LENGTH // 2)
    _, grad_key, grad_value = splash_attention.backward(
        grad,
        query,
        key[:, :, half],
        value[:, :, half],
        None,
        output.astype(jnp.bfloat16),
        log_sums,
        False,
        factor,
        interpret=True,
    )
    for ours, theirs in zip((grad_key, grad_value), (each[:, :, half] for each in expected[1:]), strict=True):
        assert np.linalg.norm(ours.astype("float32") - theirs) < 0.01 * np.linalg.norm(theirs)


@pytest.mark.parametrize(
    ("place", "batch", "window", "length"),
    [
        (0, 1, None, LENGTH),
        (128, 2, None, LENGTH),
        (512, 2, None, LENGTH),
        (0, 1, 2, LENGTH),
        (384, 1, 100, LENGTH),
        (512, 1, 513, LENGTH),
        (300, 1, 100, LENGTH - 44),  # padded
    ],
)
def test_queries_from_a_place_that_is_data_on(
    place: int, batch: int, window: int | None, length: int
) -> None:
    """As ranks that share a sequence have them. Some keys are of no document of the queries."""
    query, _, _, grad = _arrays(length, batch, 64)
    _, key, value, _ = _arrays(2 * length, batch, 64)
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (batch, 2 * length)), 1)
    of_keys = np.where(np.random.default_rng(2).random(ids.shape) > 0.9, 9, ids)
    said = np.concatenate([ids[:, place : place + length], of_keys, np.full((batch, 1), place)], 1)
    factor = jnp.float32(0.125)

    @jax.jit
    def found(said: jax.Array) -> tuple[jax.Array, ...]:
        output, sums = splash_attention.forward(query, key, value, said, True, factor, interpret=True)
        return output, *splash_attention.backward(
            grad, query, key, value, said, output, sums, True, factor, interpret=True
        )

    documents = jnp.broadcast_to(said[:, None, None, :], (batch, 1, window or 1, said.shape[1]))
    wide = [each.astype(jnp.float32) for each in (query, key, value, grad)]
    exact, exact_sums = blocked_attention.forward(*wide[:3], documents, True, factor)
    gradients = blocked_attention.backward(wide[3], *wide[:3], documents, exact, exact_sums, True, factor)
    for ours, theirs in zip(found(documents), (exact, *gradients), strict=True):
        assert np.linalg.norm(ours.astype("float32") - theirs) < 0.01 * np.linalg.norm(theirs)


def _ours_and_exact(
    tensors: tuple[jax.Array, ...], documents: jax.Array, factor: jax.Array
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Results, log sums and gradients of the kernels, and of float32 blocks."""
    *given, grad = tensors
    output, sums = splash_attention.forward(*given, documents, True, factor, interpret=True)
    found = splash_attention.backward(grad, *given, documents, output, sums, True, factor, interpret=True)
    *wide, wide_grad = (each.astype(jnp.float32) for each in tensors)
    exact, exact_sums = blocked_attention.forward(*wide, documents, True, factor)
    gradients = blocked_attention.backward(wide_grad, *wide, documents, exact, exact_sums, True, factor)
    return (output, sums, *found), (exact, exact_sums, *gradients)


@pytest.mark.parametrize(("window", "length"), [(2, 1024), (200, 1024), (513, 1024), (200, 900)])
def test_a_window(window: int, length: int) -> None:
    ids = np.sort(np.random.default_rng(1).integers(0, 2, (1, length)), 1)
    documents = jnp.broadcast_to(ids[:, None, None, :], (1, 1, window, length))
    found, exact = _ours_and_exact(_arrays(length, 1, 64), documents, jnp.float32(0.125))
    for ours, theirs in zip(found, exact, strict=True):
        assert np.linalg.norm(ours.astype("float32") - theirs) < 0.01 * np.linalg.norm(theirs)


def test_queries_that_look_nowhere_have_no_result_and_give_no_gradient() -> None:
    """As those of padding on the left do; whatever the gradients of their results are."""
    tensors = _arrays(LENGTH, 1, 64)
    said = np.ones((1, 2 * LENGTH), int)
    said[:, LENGTH : LENGTH + 300] = 0
    documents, factor = jnp.asarray(said)[:, None, None, :], jnp.float32(0.125)
    (output, sums, *found), (exact, exact_sums, *gradients) = _ours_and_exact(tensors, documents, factor)
    alone, _ = splash_attention.forward(
        *tensors[:3], documents, True, factor, has_log_sums=False, interpret=True
    )
    assert not output[:, :, :300].any()
    assert np.array_equal(alone, output)
    assert np.array_equal(sums == -np.inf, exact_sums == -np.inf)
    for ours, theirs in zip((output, *found), (exact, *gradients), strict=True):
        assert np.linalg.norm(ours.astype("float32") - theirs) < 0.01 * np.linalg.norm(theirs)


def _query(length: int, dtype: str = "bfloat16", size: int = 64) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, 2, length, size), dtype)


def test_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mask, ids = (jax.ShapeDtypeStruct((1, 1, 1, 4096), dtype) for dtype in ("bool", "int64"))
    with lowering_for("tpu"):
        for length in (1024, 2560, 4096, 32_768):
            assert splash_attention.fits(*[_query(length)] * 3, None)
        assert splash_attention.fits(*[_query(4096, size=192)] * 2, _query(4096), None)
        assert not splash_attention.fits(*[_query(1023)] * 3, None)  # short
        assert splash_attention.fits(*[_query(4096)] * 3, ids)
        assert not splash_attention.fits(*[_query(4096)] * 3, mask)
        window, at_place = (jax.ShapeDtypeStruct((1, 1, 512, n), "int64") for n in (4096, 2 * 4096 + 1))
        assert splash_attention.fits(*[_query(4096)] * 3, window)
        assert splash_attention.fits(*[_query(4096)] * 3, at_place)
        assert splash_attention.fits(_query(512), *[_query(4096)] * 2, at_place)  # half of a rank's part
        assert splash_attention.fits(_query(257), *[_query(4000)] * 2, at_place)
        assert not splash_attention.fits(_query(256), *[_query(4096)] * 2, at_place)
        assert not splash_attention.fits(*[_query(4096, "float32")] * 3, None)
        assert not splash_attention.fits(_query(1), *[_query(4096)] * 2, None)  # a token of generated text
    for platform in ("cpu", "cuda"):
        with lowering_for(platform):
            assert not splash_attention.fits(*[_query(4096)] * 3, None)


@pytest.mark.parametrize(("length", "count"), [(2048, 1), (1100, 1), (512, 0)])
def test_a_tpus_program_has_the_kernels(monkeypatch: pytest.MonkeyPatch, length: int, count: int) -> None:
    """One forward, two backward; and no scores."""
    monkeypatch.undo()
    query, log_sums = _query(length), jax.ShapeDtypeStruct((1, 2, length), "float32")
    name = "_scaled_dot_product_efficient_attention"

    def forward(*given: jax.Array) -> Any:
        return apply(TABLE[name], [*given, None, True, 0.0, True], {}, (query, log_sums, None, None))

    def backward(*given: jax.Array) -> Any:
        grad, query_, key, value, output, sums = given
        rest = [None, output, sums, None, None, 0.0, (True, True, True, False), True]
        specs = query, query, query, None
        return apply(TABLE[f"{name}_backward"], [grad, query_, key, value, *rest], {}, specs)

    with lowering_for("tpu"):
        texts = [
            str(jax.make_jaxpr(forward)(*[query] * 3)),
            str(jax.make_jaxpr(backward)(*[query] * 5, log_sums)),
        ]
    assert [text.count("pallas_call[") for text in texts] == [count, 2 * count]
    assert all((f"{length},{length}]" in text) == (count == 0) for text in texts)
