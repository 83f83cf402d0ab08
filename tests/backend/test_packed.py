"""Flat buffers in parts: the order of the collectives that work on them."""

import jax
import jax.extend as jex
import jax.numpy as jnp
import pytest

from tpu_backend.lowering.collectives import axis_of
from tpu_backend.lowering.platforms import lowering_for
from tpu_backend.runtime import gathers, packed

RANKS = (0, 1)


def program(platform: str, num_scatters: int) -> jex.core.Jaxpr:
    """So many scatters, and a gather."""

    def step(gradients: list[jax.Array], weight: jax.Array) -> list[jax.Array]:
        scattered = [
            packed.RULES["tpu_collective::reduce_scatter"](packed.Packed((each,), (16,)), "sum", RANKS)
            for each in gradients
        ]
        gathered = packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), RANKS)
        return [*(each.whole() for each in scattered), gathered.whole()]

    given = [jnp.zeros((4, 4))] * num_scatters, jnp.zeros((2, 4))
    with axis_of(RANKS), lowering_for(platform), gathers.traced_program():
        return jax.make_jaxpr(step)(*given).jaxpr


@pytest.mark.parametrize("num_scatters", [0, 1, 2, 3])
def test_on_a_tpu_a_gather_comes_after_the_scatters_before_it(num_scatters: int) -> None:
    # XLA puts what it makes an all-reduce of at the program's end: until then all gradients are whole.
    equations = program("tpu", num_scatters).eqns
    scattered = [each.outvars[0] for each in equations if each.primitive.name == "reduce_scatter"]
    assert len(scattered) == num_scatters
    barriers = [each for each in equations if each.primitive.name == "optimization_barrier"]
    # A rank's part is taken at once: it would be taken where it is used, out of a whole gradient.
    parts = [each.outvars[0] for each in barriers[:num_scatters]]
    assert [each.invars for each in barriers[:num_scatters]] == [[each] for each in scattered]
    of_gathers = barriers[num_scatters:]
    assert [each.invars[1:] for each in of_gathers] == ([parts] if num_scatters else [])
    (gather,) = (each for each in equations if each.primitive.name == "all_gather")
    assert [each.outvars[0] in gather.invars for each in of_gathers] == [True] * len(of_gathers)


def test_elsewhere_a_gather_waits_for_nothing() -> None:
    operations = [each.primitive.name for each in program("cuda", 3).eqns]
    assert "reduce_scatter" in operations
    assert "optimization_barrier" not in operations


def test_on_a_tpu_a_forward_pass_has_one_gather_ahead() -> None:
    # XLA would gather the weights of all layers first, as long as there is memory.
    def forward(hidden: jax.Array, weights: list[jax.Array]) -> list[jax.Array]:
        made = [hidden]
        for weight in [*weights, weights[-1]]:  # the last one's backward pass follows at once
            gathered = packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), RANKS)
            made.append(made[-1] @ gathered.whole().reshape(4, 4))
            gathers.note_made("aten::mm", [made[-1], jnp.ones((2, 2))])
        return made[1:]

    with axis_of(RANKS), lowering_for("tpu"), gathers.traced_program():
        jaxpr = jax.make_jaxpr(forward)(jnp.zeros((4, 4)), [jnp.zeros((2, 4))] * 4).jaxpr
    names = [each.primitive.name for each in jaxpr.eqns]
    assert names.count("all_gather") == 4
    barriers = [each for each in jaxpr.eqns if each.primitive.name == "optimization_barrier"]
    # The third waits for what was there when the second was asked for: the first one's product.
    assert [each.invars[1:] for each in barriers] == [[result] for result in jaxpr.outvars[:2]]
    gathered = [each.invars[0] for each in jaxpr.eqns if each.primitive.name == "all_gather"]
    assert gathered[2:] == [each.outvars[0] for each in barriers]


def test_a_gather_runs_after_the_gradients_that_a_loss_made() -> None:
    # A tied head's is scattered last: its product would be put off, and all logits kept for it.
    def backward(gradient: jax.Array, weight: jax.Array) -> jax.Array:
        gathers.note_made("tpu::loss_gradient", [gradient * 2])
        return packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), RANKS).whole()

    with axis_of(RANKS), lowering_for("tpu"), gathers.traced_program():
        jaxpr = jax.make_jaxpr(backward)(jnp.zeros((4, 4)), jnp.zeros((2, 4))).jaxpr
    (product,) = [each for each in jaxpr.eqns if each.primitive.name == "mul"]
    (barrier,) = [each for each in jaxpr.eqns if each.primitive.name == "optimization_barrier"]
    (gather,) = [each for each in jaxpr.eqns if each.primitive.name == "all_gather"]
    assert barrier.invars[1:] == product.outvars
    assert gather.invars == barrier.outvars[:1]


@pytest.mark.parametrize(
    ("between", "num_gathers"), [([], 1), (["other"], 2), (["other"] * 2, 4), (["scatter"], 2)]
)
def test_a_gather_is_made_once_for_two_units_that_follow_each_other(
    between: list[str], num_gathers: int
) -> None:
    def step(weight: jax.Array, others: list[jax.Array], gradient: jax.Array) -> list[jax.Array]:
        def gathered(shard: jax.Array) -> jax.Array:
            found = packed.RULES["tpu_collective::all_gather"](packed.Packed((shard,), (8,)), RANKS)
            return found.whole()

        made = [gathered(weight)]
        for number, each in enumerate(between):
            if each == "other":
                made.append(gathered(others[number]))
            else:
                scatter = packed.RULES["tpu_collective::reduce_scatter"]
                made.append(scatter(packed.Packed((gradient,), (16,)), "sum", RANKS).whole())
        return [*made, gathered(weight)]

    with axis_of(RANKS), lowering_for("tpu"), gathers.traced_program():
        shard = jnp.zeros((2, 4))
        jaxpr = jax.make_jaxpr(step)(shard, [shard + 0, shard + 0], jnp.zeros((4, 4))).jaxpr
    assert [each.primitive.name for each in jaxpr.eqns].count("all_gather") == num_gathers


def comes_from(jaxpr: jex.core.Jaxpr, result: int) -> list[str]:
    """The operations that a result was made by, the last one first, along their first operands."""
    made = {each.outvars[0]: each for each in jaxpr.eqns}
    names, variable = [], jaxpr.outvars[result]
    while variable in made:
        names.append(made[variable].primitive.name)
        variable = made[variable].invars[0]
    return names


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_under_autocast_a_tpu_gathers_in_its_dtype_and_again_for_the_backward_pass(platform: str) -> None:
    # Autograd keeps what the forward pass has converted; whole, it would be in memory until then.
    wide, narrow = jnp.dtype("float32"), jnp.dtype("bfloat16")

    def step(weight: jax.Array, gradient: jax.Array) -> list[jax.Array]:
        def gathered() -> packed.Packed:
            return packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), RANKS)

        kept = gathered().map(lambda part: gathers.converted(part, wide, narrow))
        forward = packed.read(kept, None, None)
        packed.RULES["tpu_collective::reduce_scatter"](packed.Packed((gradient,), (16,)), "sum", RANKS)
        gathered()
        backward = packed.read(kept, None, None)
        return [*forward.parts, *backward.parts]

    with axis_of(RANKS), lowering_for(platform), gathers.traced_program():
        jaxpr = jax.make_jaxpr(step)(jnp.zeros((2, 4)), jnp.zeros((4, 4))).jaxpr
    forward, backward = (comes_from(jaxpr, result) for result in range(2))
    if platform == "tpu":
        assert forward == ["all_gather", "convert_element_type"]
        assert backward == [*forward, "optimization_barrier"]
    else:
        assert forward == backward == ["convert_element_type", "all_gather"]


def test_what_one_group_gathered_is_not_taken_for_what_another_gathers() -> None:
    def step(weight: jax.Array) -> tuple[jax.Array, ...]:
        def gathered(ranks: tuple[int, ...]) -> packed.Packed:
            return packed.RULES["tpu_collective::all_gather"](packed.Packed((weight,), (8,)), ranks)

        kept = gathered(RANKS).map(
            lambda part: gathers.converted(part, jnp.dtype("float32"), jnp.dtype("bfloat16"))
        )
        gathered((0, 2))
        return packed.read(kept, None, None).parts

    with axis_of(RANKS), lowering_for("tpu"), gathers.traced_program():
        jaxpr = jax.make_jaxpr(step)(jnp.zeros((2, 4))).jaxpr
    narrow = [each for each in jaxpr.eqns if each.primitive.name == "convert_element_type"]
    assert len(narrow) == 1  # that of the first group
    assert comes_from(jaxpr, 0) == ["all_gather", "convert_element_type"]
