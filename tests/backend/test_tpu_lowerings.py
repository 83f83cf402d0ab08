"""What a lowering does otherwise where it is for a TPU, run on the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.lowering.registry import TABLE, apply


def traced(name: str, platform: str, *arguments: Any, dtype: Any = None) -> Callable[..., Any]:
    """The lowering for a platform, as a function of its arrays; `dtype`: of its results, if not its own."""
    results = TABLE[name].function(*arguments)
    specs = tuple(
        None if each is None else jax.ShapeDtypeStruct(each.shape, dtype or each.dtype)
        for each in (results if isinstance(results, tuple) else (results,))
    )

    def run(*arrays: jax.Array) -> Any:
        given = iter(arrays)
        values = [next(given) if isinstance(each, jax.Array) else each for each in arguments]
        with lowering_for(platform):
            return apply(TABLE[name], values, {}, specs)

    return run


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_tpu_picks_log_probabilities_without_a_gather(reduction: int, is_weighted: bool) -> None:
    with jax.enable_x64(True):
        logits = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")
        logits[2, 3], logits[4, 1] = -np.inf, np.nan  # beside the targets
        values, target = jnp.asarray(logits), jnp.asarray([4, -100, 0, 2, 3, 1], jnp.int64)
        values = values.at[5, 1].set(-np.inf) if reduction == 0 else values  # a target's own
        weight = jnp.asarray([1.0, 2.0, 0.0, 4.0, 5.0], jnp.float32) if is_weighted else None
        arguments = (values, target, weight, reduction, -100)
        arrays = [each for each in arguments if isinstance(each, jax.Array)]
        for_tpu, for_cpu = (traced("nll_loss_forward", each, *arguments) for each in ("tpu", "cpu"))
        for found, expected in zip(for_tpu(*arrays), for_cpu(*arrays), strict=True):
            np.testing.assert_array_equal(found, expected)
            assert np.isnan(np.asarray(found)).sum() == 0
        text = [str(jax.make_jaxpr(each)(*arrays)) for each in (for_tpu, for_cpu)]
        # Weights are gathered by their class; log-probabilities on the CPU alone.
        assert text[1].count("gather[") - text[0].count("gather[") == 1


def products(function: Callable[..., Any], *arrays: jax.Array) -> set[tuple[str, str]]:
    """The dtypes of operands and results of all matrix products."""
    equations = jax.make_jaxpr(function)(*arrays).eqns
    found = [each for each in equations if each.primitive.name == "dot_general"]
    assert found
    return {(str(each.invars[0].aval.dtype), str(each.outvars[0].aval.dtype)) for each in found}


@pytest.mark.parametrize(("name", "sizes"), [("mm", ((3, 4), (4, 5))), ("bmm", ((2, 16, 9), (2, 9, 17)))])
def test_a_tpu_rounds_16_bit_products_in_its_matrix_unit(
    name: str, sizes: tuple[tuple[int, ...], ...]
) -> None:
    random = np.random.default_rng(0)
    for dtype, on_tpu in (("bfloat16", {("bfloat16", "bfloat16")}), ("float32", {("float32", "float32")})):
        arrays = [jnp.asarray(random.normal(size=size), dtype) for size in sizes]
        for_tpu, for_cpu = (traced(name, each, *arrays, dtype=dtype) for each in ("tpu", "cpu"))
        assert products(for_tpu, *arrays) == on_tpu
        (found,), (expected,) = for_tpu(*arrays), for_cpu(*arrays)
        assert found.dtype == expected.dtype == dtype
        np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), rtol=2**-7)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_tpu_multiplies_attentions_16_bit_tensors_as_they_are(is_causal: bool) -> None:
    random = np.random.default_rng(0)
    query, key, value, grad = (
        jnp.asarray(random.normal(size=(1, heads, 8, 16)), "bfloat16") for heads in (4, 2, 2, 4)
    )
    forward, backward = (f"_scaled_dot_product_efficient_attention{suffix}" for suffix in ("", "_backward"))
    found = {}
    for platform in ("tpu", "cpu"):
        arguments = (query, key, value, None, True, 0.0, is_causal)
        attend = traced(forward, platform, *arguments)
        output, log_sums, *_ = attend(query, key, value)
        given = (
            grad,
            query,
            key,
            value,
            None,
            output,
            log_sums,
            None,
            None,
            0.0,
            [True] * 3 + [False],
            is_causal,
        )
        differentiate = traced(backward, platform, *given)
        arrays = (grad, query, key, value, output, log_sums)
        found[platform] = [output, *differentiate(*arrays)[:3]]
        expected = {("float32", "float32")}
        if platform == "tpu":  # scores are rounded: they stay in memory
            expected = {("bfloat16", "float32"), ("bfloat16", "bfloat16")}
        assert products(attend, query, key, value) == products(differentiate, *arrays) == expected
    for ours, exact in zip(found["tpu"], found["cpu"], strict=True):
        error = np.linalg.norm(ours.astype("float32") - exact.astype("float32"))
        assert error < 0.01 * np.linalg.norm(exact.astype("float32"))
