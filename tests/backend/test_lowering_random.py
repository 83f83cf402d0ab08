"""Random lowerings: distributions, ranges, and bits that do not depend on the program around them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpu_backend.lowering import TABLE, apply

SHAPE = (200, 500)


def draw(
    name: str, *args: object, dtype: object = jnp.float32, shape: tuple[int, ...] = SHAPE, seed: int = 0
):
    with jax.enable_x64(True):
        out = (jax.ShapeDtypeStruct(shape, dtype),)

        def run(key):
            return apply(TABLE[name], [jnp.zeros(shape, dtype), *args], {"generator": None}, out, key=key)[0]

        return jax.jit(run)(jax.random.key(seed))


@pytest.mark.parametrize(
    ("name", "args", "mean", "std"),
    [
        ("normal_functional", (1.0, 2.0), 1.0, 2.0),
        ("uniform", (-1.0, 3.0), 1.0, 4 / math.sqrt(12)),
        ("exponential", (2.0,), 0.5, 0.5),
        ("geometric", (0.25,), 4.0, math.sqrt(0.75) / 0.25),
        ("bernoulli.p", (0.3,), 0.3, math.sqrt(0.21)),
        ("log_normal", (0.0, 0.5), math.exp(0.125), math.sqrt((math.exp(0.25) - 1) * math.exp(0.25))),
    ],
)
def test_moments(name: str, args: tuple[float, ...], mean: float, std: float) -> None:
    values = np.asarray(draw(name, *args))
    assert values.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(values.size))
    assert values.std() == pytest.approx(std, rel=0.03)


def test_dirichlet_draws_have_the_mean_of_their_concentrations() -> None:
    concentrations = np.array([0.05, 1.0, 4.0], np.float32)
    with jax.enable_x64(True):
        shape = (5000, 3)
        out = (jax.ShapeDtypeStruct(shape, jnp.float32),)
        given = jnp.broadcast_to(concentrations, shape)
        values = apply(TABLE["_sample_dirichlet"], [given], {}, out, key=jax.random.key(0))[0]
    mean = concentrations / concentrations.sum()
    std = np.sqrt(mean * (1 - mean) / (concentrations.sum() + 1))
    assert np.asarray(values).sum(-1) == pytest.approx(1, abs=1e-5)
    assert np.abs(np.asarray(values).mean(0) - mean).max() < 5 * std.max() / math.sqrt(shape[0])


def test_binomial_draws_have_the_moments_of_their_counts_and_chances() -> None:
    counts, chances = np.array([[1.0], [10.0], [300.0]], np.float32), np.array([0.0, 0.3, 1.0], np.float32)
    with jax.enable_x64(True):
        shape = (20000, 3, 3)
        out = (jax.ShapeDtypeStruct(shape, jnp.float32),)
        given = [jnp.broadcast_to(counts, shape), jnp.broadcast_to(chances, shape)]
        values = np.asarray(apply(TABLE["binomial"], given, {}, out, key=jax.random.key(0))[0])
    std = np.sqrt(counts * chances * (1 - chances))
    assert np.all(values == np.round(values))
    assert np.all(np.abs(values.mean(0) - counts * chances) <= 5 * std / math.sqrt(shape[0]))
    assert values.std(0) == pytest.approx(std, rel=0.03)


@pytest.mark.parametrize(
    ("count", "chance", "expected"),
    [
        (-3.0, 0.3, 0),
        (5.0, -0.5, 0),
        (2.5, 1.5, 2.5),
        (5.0, math.nan, math.nan),
        (math.nan, 0.3, math.nan),
        (math.inf, 0.3, math.nan),
    ],
)
def test_binomial_ends_with_counts_and_chances_that_are_none(
    count: float, chance: float, expected: float
) -> None:
    with jax.enable_x64(True):
        given = [jnp.asarray([value], jnp.float32) for value in (count, chance)]
        out = (jax.ShapeDtypeStruct((1,), jnp.float32),)
        [value] = apply(TABLE["binomial"], given, {}, out, key=jax.random.key(0))[0].tolist()
    assert value == pytest.approx(expected, nan_ok=True)


def test_uniform_stays_below_its_upper_end_in_bfloat16() -> None:
    values = np.asarray(draw("uniform", 0.0, 1.0, dtype=jnp.bfloat16).astype(jnp.float32))
    assert values.min() >= 0
    assert values.max() < 1


def test_exponential_is_never_zero() -> None:
    assert np.asarray(draw("exponential", 1.0)).min() > 0


@pytest.mark.parametrize("dtype", [jnp.int64, jnp.int32, jnp.uint8, jnp.float32])
def test_random_from_covers_the_half_open_range(dtype: object) -> None:
    values = np.asarray(draw("random.from", 3, 7, dtype=dtype))
    assert sorted(set(values.ravel().tolist())) == [3, 4, 5, 6]


def test_random_without_bounds_gives_every_non_negative_integer() -> None:
    with jax.enable_x64(True):
        values = np.asarray(draw("random", dtype=jnp.dtype("int64")))
    assert values.min() >= 0
    assert values.max() > 2**62


def test_randperm_is_a_permutation() -> None:
    out = (jax.ShapeDtypeStruct((1000,), jnp.dtype("int64")),)
    with jax.enable_x64(True):
        key = jax.random.key(3)
        (values,) = apply(TABLE["randperm.generator_out"], [1000], {"generator": None}, out, key=key)
    assert sorted(values.tolist()) == list(range(1000))
    assert values.tolist() != list(range(1000))


@pytest.mark.parametrize("replacement", [True, False])
def test_multinomial_follows_the_weights(replacement: bool) -> None:
    weights = jnp.tile(jnp.asarray([0.0, 1.0, 3.0, 0.0, 4.0]), (4000, 1))
    count = 3
    out = (jax.ShapeDtypeStruct((4000, count), jnp.dtype("int64")),)
    with jax.enable_x64(True):
        (picked,) = apply(
            TABLE["multinomial"],
            [weights, count, replacement],
            {"generator": None},
            out,
            key=jax.random.key(1),
        )
    picked = np.asarray(picked)
    assert set(picked.ravel()) == {1, 2, 4}
    if replacement:
        shares = np.bincount(picked.ravel(), minlength=5) / picked.size
        np.testing.assert_allclose(shares, [0, 0.125, 0.375, 0, 0.5], atol=0.02)
    else:
        assert all(len(set(row)) == count for row in picked)


def test_dropout_keeps_and_scales() -> None:
    value = jnp.ones(SHAPE)
    out = (jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.ShapeDtypeStruct(SHAPE, jnp.bool_))
    result, mask = apply(TABLE["native_dropout"], [value, 0.2, True], {}, out, key=jax.random.key(0))
    assert np.asarray(mask).mean() == pytest.approx(0.8, abs=0.01)
    np.testing.assert_array_equal(np.asarray(result), np.where(np.asarray(mask), np.float32(1.25), 0))


def test_keys_give_different_numbers_and_the_same_key_the_same() -> None:
    first, second, again = (np.asarray(draw("normal_functional", 0.0, 1.0, seed=seed)) for seed in (0, 1, 0))
    assert (first == again).all()
    assert (first != second).mean() > 0.99


@pytest.mark.parametrize(
    ("name", "args", "dtype"),
    [
        ("normal_functional", (0.3, 1.7), jnp.float32),
        ("normal_functional", (0.3, 1.7), jnp.bfloat16),
        ("uniform", (-0.3, 1.7), jnp.float32),
        ("exponential", (1.7,), jnp.float32),
    ],
)
def test_bits_do_not_depend_on_the_surrounding_program(
    name: str, args: tuple[float, ...], dtype: object
) -> None:
    """Alone; with runtime parameters; among neighbours that would like to contract or to recompute them."""
    out = (jax.ShapeDtypeStruct(SHAPE, dtype),)
    factor = jnp.full(SHAPE, 1.1, dtype)

    def one(key, *parameters):
        return apply(TABLE[name], [jnp.zeros(SHAPE, dtype), *parameters], {"generator": None}, out, key=key)[
            0
        ]

    def among_neighbours(key, factor, *parameters):
        noise = one(key, *parameters)
        return noise, noise * factor + 1, jnp.sum(noise * noise), jnp.tanh(noise - factor)

    with jax.enable_x64(True):
        key = jax.random.key(5)
        alone = jax.jit(lambda key: one(key, *args))(key)
        runtime = jax.jit(one)(key, *args)
        noise, shifted, *_ = jax.jit(among_neighbours)(key, factor, *args)
        apart = jax.jit(lambda noise, factor: noise * factor + 1)(alone, factor)
    for other in (runtime, noise):
        np.testing.assert_array_equal(np.asarray(alone), np.asarray(other))
    np.testing.assert_array_equal(np.asarray(apart), np.asarray(shifted))
