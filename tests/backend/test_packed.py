"""Flat buffers in parts: the order of the collectives that work on them."""

import jax
import jax.numpy as jnp
import pytest

from tpu_backend.lowering.collectives import axis_of
from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.runtime import packed

RANKS = (0, 1)


def programs_gathers(platform: str, num_scatters: int) -> list[str]:
    """What a gather behind so many scatters is made of, as its program says."""

    def step(gradients: list[jax.Array], weight: jax.Array) -> list[jax.Array]:
        scattered = [
            packed.RULES["tpu_collective::reduce_scatter"](packed.Packed((each,), (16,)), "sum", RANKS)
            for each in gradients
        ]
        gathered = packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), RANKS)
        return [*(each.whole() for each in scattered), gathered.whole()]

    given = [jnp.zeros((4, 4))] * num_scatters, jnp.zeros((2, 4))
    with axis_of(RANKS), lowering_for(platform), packed.one_scatter_on_its_way():
        return [each.primitive.name for each in jax.make_jaxpr(step)(*given).eqns]


@pytest.mark.parametrize(("num_scatters", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_on_a_tpu_a_gather_comes_after_the_scatters_before_the_last_one(
    num_scatters: int, expected: int
) -> None:
    # XLA puts what it makes an all-reduce of at the program's end: until then all gradients are whole.
    operations = programs_gathers("tpu", num_scatters)
    assert operations.count("reduce_scatter") == num_scatters
    assert operations.count("optimization_barrier") == expected


def test_elsewhere_a_gather_waits_for_nothing() -> None:
    assert "optimization_barrier" not in programs_gathers("cuda", 3)
