"""`jax_op`: a JAX or Pallas function as a differentiable PyTorch operator.

Each form of a function (its static arguments, the number of its inputs and outputs) becomes an operator of
the namespace `tpu_jax` and one entry of the lowering table.  So a call is one entry of the op stream and is
compiled together with what surrounds it.  Gradients are `jax.vjp`, batching is `jax.vmap`; both are made the
same way, as functions that become operators, so that they can be differentiated and batched again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.library import Library

from tpu_backend import _C
from tpu_backend.after_import import after_import
from tpu_backend.exact_key import exact_key
from tpu_backend.interrupts import keeps_interrupts
from tpu_backend.lowering.registry import lowering
from tpu_backend.runtime.dtypes import EQUIVALENTS, from_numpy, jax_dtype, to_numpy
from tpu_backend.untraced import untraced

NAMESPACE = "tpu_jax"
_library = Library(NAMESPACE, "FRAGMENT")
_taken: set[str] = set()

Static = tuple[tuple[str, Any], ...]


def jax_op(function: Callable[..., Any], *, name: str | None = None) -> Callable[..., Any]:
    """A PyTorch operator that computes what a JAX function computes.

    The operator takes tensors by position and static values, which must be hashable, by keyword;
    ``function`` gets arrays and the same keywords, and returns an array or a tree of arrays, which comes back
    as the same tree of tensors.  It must be pure and traceable.  Each set of static values is compiled anew;
    2, 2.0 and True are three of them, and so are 0.0 and -0.0.

        @jax_op
        def rms_norm(x, scale, *, eps):
            return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps) * scale

        y = rms_norm(x, weight, eps=1e-6)

    On tpu tensors a call is one operation of the op stream, on CPU tensors JAX computes it on the CPU.
    `backward` calls ``jax.vjp`` of the function, which computes the forward values again where they are not
    in the same program; a `jax.custom_vjp` is respected.  Double backward, forward-mode differentiation and
    `torch.func` (grad, vmap, jacrev, jacfwd) work. `torch.compile` keeps a call in its graph where the static
    values are numbers, text, None or tuples of them, and breaks the graph for others.

    JAX's rules for dtypes hold inside: without its x64 switch an int64 tensor arrives as int32.  Where an
    input is float64 or complex128, or the switch is on, the function runs with 64-bit types.

    ``name`` is what profiles and error messages call it (default: the function's own).
    """
    chosen = str(name or getattr(function, "__name__", "function"))
    return _JaxOp(function, re.sub(r"\W", "_", chosen).strip("_") or "function")


@dataclass(frozen=True)
class _Operator:
    """One operator of the dispatcher, and all that its derivatives ask about it."""

    op: _JaxOp
    static: Static
    num_inputs: int
    num_outputs: int
    compute: Callable[..., tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class _Form:
    """What one set of input shapes and dtypes comes to."""

    operator: _Operator
    tree: Any  # how the outputs are arranged


class _JaxOp:
    """The operators of one function, made as they are needed."""

    def __init__(self, function: Callable[..., Any], name: str):
        self.__doc__ = function.__doc__
        self.name = name
        self._function = function
        self._forms: dict[Any, _Form] = {}
        self._operators: dict[Any, _Operator] = {}
        self._derived: dict[str, _JaxOp] = {}
        self._number = len(_made)
        _made.append(self)

    def __repr__(self) -> str:
        return f"<jax_op {self.name}>"

    def __call__(self, *tensors: torch.Tensor, **static: Any) -> Any:
        return _call(self._number, tensors, static)

    def call(self, tensors: tuple[torch.Tensor, ...], static: dict[str, Any]) -> Any:
        """What `__call__` does, out of Dynamo's sight."""
        for place, value in enumerate(tensors):
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"{self.name}: positional argument {place} is {type(value).__name__}; "
                    "tensors are given by position, static values by keyword"
                )
        if not tensors:
            raise TypeError(f"{self.name}: expected at least one tensor: it decides on the device")
        on_device = next((each.device for each in tensors if each.device.type == "tpu"), None)
        if on_device is not None:  # as in PyTorch, a number may be a 0-d CPU tensor
            tensors = tuple(each.to(on_device) if each.dim() == 0 else each for each in tensors)
        # torch.compile may hold a size open: a static value has its number.
        values = (
            (key, int(each) if isinstance(each, torch.SymInt) else each) for key, each in static.items()
        )
        form = self._form(tensors, tuple(sorted(values)))
        return jax.tree.unflatten(form.tree, _Differentiable.apply(form.operator, *tensors))

    def derived(self, kind: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> _JaxOp:
        """The operator of a function made from this one, such as its gradient; made once."""
        if kind not in self._derived:
            self._derived[kind] = _JaxOp(make(self._function), f"{self.name}_{kind}")
        return self._derived[kind]

    def _form(self, tensors: Sequence[torch.Tensor], static: Static) -> _Form:
        wide = jax.dtypes.canonicalize_dtype(np.int64) == np.int64 or any(
            each.dtype in (torch.float64, torch.complex128) for each in tensors
        )
        # As numbers: a graph with a call in it is compiled anew for each size.
        kind = wide, exact_key(static)
        key = (kind, *((*map(int, each.shape), each.dtype) for each in tensors))
        try:
            found = self._forms.get(key)
        except TypeError as error:
            raise TypeError(f"{self.name}: static values must be hashable: {error}") from error
        if found is None:
            run = _runner(self._function, static, wide)
            outputs, tree = jax.tree.flatten(_shapes(run, tensors))
            counts = (len(tensors), len(outputs))
            if (kind, counts) not in self._operators:
                compute = _register(self.name, run, *counts)
                self._operators[kind, counts] = _Operator(self, static, *counts, compute)
            found = self._forms[key] = _Form(self._operators[kind, counts], tree)
        return found


_made: list[_JaxOp] = []  # registered for the life of the process, as their operators are


@untraced  # and what it calls, behind a graph break: Dynamo would trace JAX
@keeps_interrupts
def _call(number: int, tensors: tuple[torch.Tensor, ...], static: dict[str, Any]) -> Any:
    return _made[number].call(tensors, static)


def _keep_in_graphs(decorators: ModuleType) -> None:
    """A call is one node of Dynamo's graphs, which AOTAutograd looks into, instead of Python to be traced."""
    global _call
    _call = decorators.nonstrict_trace(_call)


after_import("torch._dynamo.decorators", _keep_in_graphs)


class _Differentiable(torch.autograd.Function):
    """An operator with its derivatives; its inputs are the operator and its tensors, its outputs a tuple."""

    @staticmethod
    def forward(operator: _Operator, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return operator.compute(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.operator = inputs[0]
        ctx.is_differentiable = [each.is_floating_point() or each.is_complex() for each in output]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        operator = ctx.operator
        wanted = tuple(place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed)
        given = itertools.compress(gradients, ctx.is_differentiable)
        backward = operator.op.derived("backward", _backward_of)
        found = backward(
            *ctx.saved_tensors, *given, wanted=wanted, num_inputs=operator.num_inputs, static=operator.static
        )
        places = dict(zip(wanted, found, strict=True))
        return None, *(places.get(place) for place in range(operator.num_inputs))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        operator = ctx.operator
        moving = tuple(place for place, tangent in enumerate(tangents) if tangent is not None)
        given = [tangents[place] for place in moving]
        forward = operator.op.derived("jvp", _jvp_of)
        found = iter(
            forward(
                *ctx.saved_tensors,
                *given,
                moving=moving,
                num_inputs=operator.num_inputs,
                static=operator.static,
            )
        )
        return tuple(next(found) if moves else None for moves in ctx.is_differentiable)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], operator: _Operator, *tensors: torch.Tensor) -> Any:
        batched = operator.op.derived("vmap", _vmap_of)
        found = batched(*tensors, in_dims=tuple(in_dims[1:]), static=operator.static)
        return tuple(found), (0,) * operator.num_outputs


def _runner(function: Callable[..., Any], static: Static, wide: bool) -> Callable[..., Any]:
    """The function with its static values, under the dtype rules that its author expects."""

    def run(*arrays: jax.Array) -> Any:
        if wide:
            return function(*arrays, **dict(static))
        arrays = tuple(each.astype(_NARROW.get(each.dtype, each.dtype)) for each in arrays)
        with jax.enable_x64(False):
            return function(*arrays, **dict(static))

    return run


_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}


def _shapes(run: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
    """Shapes and dtypes of what the function makes of such tensors, in its own arrangement."""
    with jax.enable_x64(True):
        return jax.eval_shape(
            run,
            *(jax.ShapeDtypeStruct(tuple(map(int, each.shape)), jax_dtype(each.dtype)) for each in tensors),
        )


def _register(
    wished: str, run: Callable[..., Any], num_inputs: int, num_outputs: int
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Make one operator: its schema, its lowering, its shape inference, its kernel for the CPU."""
    numbered = (f"{wished}_{number}" for number in itertools.count(2))
    name = next(each for each in itertools.chain([wished], numbered) if each not in _taken)
    _taken.add(name)
    qualified = f"{NAMESPACE}::{name}"
    inputs = ", ".join(f"Tensor x{place}" for place in range(num_inputs))
    _library.define(f"{name}({inputs}) -> ({', '.join(['Tensor'] * num_outputs)})")

    def leaves(*arrays: jax.Array) -> list[jax.Array]:
        return jax.tree.leaves(run(*arrays))

    def returned(tensors: list[torch.Tensor]) -> Any:
        return tensors[0] if num_outputs == 1 else tuple(tensors)

    @keeps_interrupts
    def infer(*tensors: torch.Tensor) -> Any:
        return returned(
            [
                tensors[0].new_empty(shape.shape, dtype=EQUIVALENTS[shape.dtype])
                for shape in jax.tree.leaves(_shapes(run, tensors))
            ]
        )

    compiled = jax.jit(leaves)

    @keeps_interrupts
    def compute_on_cpu(*tensors: torch.Tensor) -> Any:
        arrays = [to_numpy(each.resolve_conj().resolve_neg()) for each in tensors]
        with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
            results = [np.array(each) for each in compiled(*arrays)]
        return returned([from_numpy(each, EQUIVALENTS[each.dtype]) for each in results])

    lowering(qualified)(leaves)
    _C.register_lowered_ops([(qualified, qualified, [], [], [], 0, {})])
    _library.impl(name, untraced(infer), "Meta")
    _library.impl(name, untraced(compute_on_cpu), "CPU")
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return (lambda *tensors: (overload(*tensors),)) if num_outputs == 1 else overload


def _backward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """(inputs, gradients of the floating outputs) -> gradients of the inputs in ``wanted``."""

    def backward(
        *arrays: jax.Array, wanted: tuple[int, ...], num_inputs: int, static: Static
    ) -> list[jax.Array]:
        inputs, gradients = arrays[:num_inputs], arrays[num_inputs:]

        def forward(*chosen: jax.Array) -> list[jax.Array]:
            return _floating(function(*_replaced(inputs, wanted, chosen), **dict(static)))

        _, transpose = jax.vjp(forward, *(inputs[place] for place in wanted))
        # PyTorch's gradient of a complex number is the conjugate of JAX's.
        return [jnp.conj(each) for each in transpose([jnp.conj(each) for each in gradients])]

    return backward


def _jvp_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """(inputs, tangents of the inputs in ``moving``) -> tangents of the floating outputs."""

    def forward_mode(
        *arrays: jax.Array, moving: tuple[int, ...], num_inputs: int, static: Static
    ) -> list[jax.Array]:
        inputs, tangents = arrays[:num_inputs], arrays[num_inputs:]

        def forward(*chosen: jax.Array) -> list[jax.Array]:
            return _floating(function(*_replaced(inputs, moving, chosen), **dict(static)))

        return jax.jvp(forward, tuple(inputs[place] for place in moving), tuple(tangents))[1]

    return forward_mode


def _floating(outputs: Any) -> list[jax.Array]:
    """The arrays of a tree that have derivatives."""
    return [each for each in jax.tree.leaves(outputs) if jnp.issubdtype(each.dtype, jnp.inexact)]


def _replaced(values: Sequence[Any], places: Sequence[int], fresh: Sequence[Any]) -> list[Any]:
    """`values` with those at `places` replaced."""
    changed = list(values)
    for place, value in zip(places, fresh, strict=True):
        changed[place] = value
    return changed


def _vmap_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function over a batch: ``in_dims`` says for each input which dim is the batch's, or None."""

    def batched(*arrays: jax.Array, in_dims: tuple[int | None, ...], static: Static) -> list[jax.Array]:
        def one(*inputs: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*inputs, **dict(static)))

        return jax.vmap(one, in_axes=in_dims)(*arrays)

    return batched
