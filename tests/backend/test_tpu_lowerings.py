"""What a lowering does otherwise where it is for a TPU, run on the CPU."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.lowering.registry import TABLE, apply


def traced(name: str, platform: str, *arguments: Any) -> Callable[..., Any]:
    """The lowering for a platform, as a function of its arrays."""
    specs = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in TABLE[name].function(*arguments))

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
