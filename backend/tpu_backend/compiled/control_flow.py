"""`torch.cond`, `while_loop`, `scan` and `associative_scan` in a graph, as XLA's own control flow.

Each is called as the evaluators of `tpu_backend.compiled.graph` are, where a sub-graph among the arguments is
a `Graph`; what it closes over is among its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tpu_backend.compiled.subgraph import SubGraph
from tpu_backend.lowering.bounds import IN_RANGE, require_of_part
from tpu_backend.lowering.registry import NotLoweredError

_Arrays = Sequence[jax.Array]


def _in_range(count: int) -> list[jax.Array]:
    return [jnp.asarray(IN_RANGE, jnp.int64)] * count


def _cond(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    predicate, on_true, on_false, operands = args
    branches = [SubGraph(graph, symbols, operands) for graph in (on_true, on_false)]
    first, second = (branch.counted() for branch in branches)

    def true() -> Any:
        outputs, out_of_range = branches[0]()
        return outputs, [*out_of_range, *_in_range(second)]

    def false() -> Any:
        outputs, out_of_range = branches[1]()
        return outputs, [*_in_range(first), *out_of_range]

    outputs, out_of_range = jax.lax.cond(jnp.asarray(predicate).reshape(()), true, false)
    require_of_part([*branches[0].bounds_checks, *branches[1].bounds_checks], out_of_range)
    return outputs


def _while_loop(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    condition, body, carried, closed_over = args
    if any(not hasattr(value, "dtype") for value in carried) or any(kwargs.values()):
        raise NotLoweredError("a while_loop that carries a number, or writes what it closes over")
    go_on, turn = (SubGraph(graph, symbols, closed_over) for graph in (condition, body))
    # The condition stands at the end of the body, since XLA's own condition returns nothing but a bool.
    (goes_on,), out_of_range = go_on(*carried)
    start = (goes_on.reshape(()), list(carried), [*out_of_range, *_in_range(turn.counted(*carried))])

    def step(state: Any) -> Any:
        _, values, before = state
        values, in_body = turn(*values)
        (goes_on,), in_condition = go_on(*values)
        return goes_on.reshape(()), values, _worst(before, [*in_condition, *in_body])

    _, values, out_of_range = jax.lax.while_loop(lambda state: state[0], step, start)
    require_of_part([*go_on.bounds_checks, *turn.bounds_checks], out_of_range)
    return values


def _worst(before: _Arrays, now: _Arrays) -> list[jax.Array]:
    return [jnp.maximum(first, second) for first, second in zip(before, now, strict=True)]


def _scan(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    combine, first, slices, closed_over = args
    part = SubGraph(combine, symbols, closed_over)

    def step(carried: Any, current: Any) -> Any:
        outputs, out_of_range = part(*carried, *current)
        return outputs[: len(first)], (outputs[len(first) :], out_of_range)

    carried, (stacked, out_of_range) = jax.lax.scan(step, list(first), list(slices))
    require_of_part(part.bounds_checks, _over_steps(out_of_range))
    return [*carried, *stacked]


def _associative_scan(args: Any, kwargs: Any, specs: Any, symbols: Any, take_key: Any) -> Any:
    combine, slices, closed_over = args
    part = SubGraph(combine, symbols, closed_over)

    def combined(left: Any, right: Any) -> Any:
        outputs, out_of_range = jax.vmap(part)(*left, *right)
        require_of_part(part.bounds_checks, _over_steps(out_of_range))
        return outputs

    return jax.lax.associative_scan(combined, list(slices))


def _over_steps(out_of_range: _Arrays) -> list[jax.Array]:
    return [jnp.max(each, axis=0, initial=IN_RANGE) for each in out_of_range]


TABLE: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "associative_scan": _associative_scan,
}
"""Evaluators by the name of the higher-order operator."""
