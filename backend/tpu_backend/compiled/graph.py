"""An FX graph of functional ATen operations as a pure function over JAX arrays, by the lowering table.

What a view operation does is known from its geometry alone (`tpu_backend.views`), as it is for recorded
operations. A sub-graph, of a `cond` or a loop, is a `Graph` of its own. Sizes that Dynamo keeps symbolic are
plain integers here: a graph is evaluated for a set of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import sympy
import torch
from torch import fx
from torch.fx.node import map_arg

from tpu_backend import _C, views
from tpu_backend.compiled import control_flow, flex_attention
from tpu_backend.interrupts import keeps_interrupts
from tpu_backend.lowering import factory, registry
from tpu_backend.lowering.assertions import require
from tpu_backend.lowering.bounds import collect_bounds_checks, lowering_node
from tpu_backend.lowering.names import functional_name
from tpu_backend.runtime.dtypes import EQUIVALENTS, jax_dtype
from tpu_backend.runtime.signature import result_type
from tpu_backend.runtime.target import target_platform
from tpu_backend.runtime.user_line import innermost_user_line

_aten = torch.ops.aten
_DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format"})
_ARITHMETIC = frozenset(
    getattr(operator, name)
    for name in ("add", "sub", "mul", "floordiv", "mod", "neg", "truediv", "pow", "getitem")
) | {torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, max, min}


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)

Symbols = Mapping[sympy.Symbol, int]
Evaluator = Callable[..., Any]


class UnsupportedGraphError(Exception):
    """One line: what in a graph has no XLA form."""


class Graph:
    """The graph of a `fx.GraphModule` whose placeholders are tensors and symbolic sizes.

    `problems` says of each node that has no XLA form why; such a graph cannot be evaluated as a whole.
    """

    def __init__(self, module: fx.GraphModule):
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.symbols = [_symbols_of(node.meta.get("val")) for node in self.placeholders]
        self.num_draws = 0
        self.problems: dict[fx.Node, str] = {}
        self._evaluators: dict[fx.Node, Evaluator] = {}
        self._parts: dict[fx.Node, Any] = {}  # what nodes that are no computation stand for
        for node in self.nodes:
            try:
                if node.op == "get_attr":
                    self._parts[node] = _attribute(module, node)
                elif node.op == "call_function":
                    _check_value(node)
                    self._evaluators[node] = self._evaluator(node)
                elif node.op not in ("placeholder", "output"):
                    raise UnsupportedGraphError(f"a {node.op} node ({node.target})")
            except UnsupportedGraphError as reason:
                self.problems[node] = str(reason)

    @property
    def outputs(self) -> list[Any]:
        """The nodes, or constants, that it returns."""
        (outputs,) = next(node for node in reversed(self.nodes) if node.op == "output").args
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    def described(self, place: int) -> tuple[str, str | None]:
        """What a node calls, and the user's line that it comes from, if that is known."""
        node = self.nodes[place]
        name = node.target.name() if isinstance(node.target, torch._ops.OperatorBase) else str(node.target)
        return name, innermost_user_line(node.meta.get("stack_trace") or "")

    @keeps_interrupts
    def check(self) -> None:
        """Evaluate it on shapes alone, of the sizes that Dynamo saw: a lowering that cannot express this form
        of its operation is a problem, too.
        """
        values = [node.meta["val"] for node in self.placeholders]
        symbols = {
            symbol: _hint(value, dim) for value, where in zip(values, self.symbols) for symbol, dim in where
        }

        def run() -> None:
            inputs = [_stand_ins(value, symbols) for value in values]
            self._run(inputs, symbols, lambda: jax.random.key(0), self.problems)

        with jax.enable_x64(True), collect_bounds_checks():
            jax.eval_shape(run)

    def bind(self, inputs: Sequence[Any]) -> dict[sympy.Symbol, int]:
        """What the symbolic sizes are for these inputs (tensors, arrays or integers)."""
        bound: dict[sympy.Symbol, int] = {}
        for where, value in zip(self.symbols, inputs, strict=True):
            for symbol, dim in where:
                bound[symbol] = value if dim is None else value.shape[dim]
        return bound

    def evaluate(
        self, wanted: Sequence[fx.Node], inputs: Sequence[Any], symbols: Symbols, keys: jax.Array | None
    ) -> list[jax.Array]:
        """The values of these nodes for these inputs: arrays, and integers where the placeholder is one."""
        draws = iter(range(self.num_draws))

        def take_key() -> jax.Array:
            assert keys is not None
            return keys[next(draws)] if self.num_draws > 1 else keys

        values = self._run(inputs, symbols, take_key, None)
        return [values[node] for node in wanted]

    def call(self, inputs: Sequence[Any], symbols: Symbols) -> list[Any]:
        """What it returns, as part of another graph, whose symbols these are."""
        if self.problems:
            raise UnsupportedGraphError(f"{next(iter(self.problems.values()))} (in a branch or body)")
        if self.num_draws:
            raise UnsupportedGraphError("random numbers in a branch or body: how many, the data decides")
        values = self._run(inputs, {**symbols, **self.bind(inputs)}, _no_key, None)
        return [values[node] if isinstance(node, fx.Node) else node for node in self.outputs]

    def _run(
        self,
        inputs: Sequence[Any],
        symbols: Symbols,
        take_key: Callable[[], jax.Array],
        problems: dict[fx.Node, str] | None,
    ) -> dict[fx.Node, Any]:
        """The value of each node. A node that has none is entered in `problems`, where given, as zeros."""
        values: dict[fx.Node, Any] = dict(zip(self.placeholders, inputs, strict=True)) | self._parts
        for place, node in enumerate(self.nodes):
            if node.op != "call_function":
                continue
            try:
                if problems is not None and node in problems:
                    raise UnsupportedGraphError(problems[node])
                with lowering_node(place):
                    values[node] = self._value(node, values, symbols, take_key)
            except (registry.NotLoweredError, UnsupportedGraphError) as reason:
                why = str(reason) or f"a form of {node.target} that has no lowering"
                if problems is None:
                    raise UnsupportedGraphError(why) from None
                problems[node] = why
                values[node] = _stand_ins(node.meta.get("val"), symbols)
        return values

    def _value(
        self,
        node: fx.Node,
        values: Mapping[fx.Node, Any],
        symbols: Symbols,
        take_key: Callable[[], jax.Array],
    ) -> Any:
        spec = specs_of(node.meta["val"], symbols) if "val" in node.meta else None
        if isinstance(spec, int):  # arithmetic on sizes
            return spec
        args = map_arg(node.args, values.__getitem__)
        kwargs = map_arg(node.kwargs, values.__getitem__)
        return self._evaluators[node](args, kwargs, spec, symbols, take_key)

    # -- what evaluates a node: (args, kwargs, specs of its outputs, symbols, take_key) -> value

    def _evaluator(self, node: fx.Node) -> Evaluator:
        target = node.target
        if target is operator.getitem:
            return lambda args, kwargs, *_: args[0][args[1]]
        if target in _ARITHMETIC or isinstance(node.meta.get("val"), (*_SYMBOLIC, int)):
            return lambda args, kwargs, *_: target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _HIGHER_ORDER:
            if (place := flex_attention.SCORE_MOD.get(target.name())) is not None:
                score_mod: Any = node.args[place]
                module = self._parts[score_mod].module
                self._parts[score_mod] = Graph(flex_attention.in_working_precision(module))
            return _HIGHER_ORDER[target.name()]
        if not isinstance(target, torch._ops.OpOverload):
            raise UnsupportedGraphError(f"{target} has no XLA form")
        if target in _OWN:
            return _OWN[target]
        if target in _EMPTY:  # Dynamo makes another graph where the mode changes
            fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            return _filled if fills and torch.are_deterministic_algorithms_enabled() else _zeros
        if target in _RANDOM:
            self.num_draws += 1
            return _drawn(_RANDOM[target])
        name = functional_name(target._schema) or _own_name(target._schema)
        if name is not None:
            entry = registry.TABLE[name]
            self.num_draws += entry.draws
            return _Call(node, entry)
        if target in (_aten.as_strided.default, _aten.as_strided_scatter.default):
            base = node.args[0].meta["val"]  # type: ignore[union-attr]
            if (
                not base.is_contiguous() or base.storage_offset() != 0
            ):  # it counts in storage, which is not here
                raise UnsupportedGraphError(f"{target} of a tensor that is a view")
        if target.is_view:
            return _View(node)
        if target in SCATTERS:
            return _Scatter(node, SCATTERS[target])
        raise UnsupportedGraphError(f"{target} has no lowering")


def _attribute(module: fx.GraphModule, node: fx.Node) -> Any:
    """A sub-graph, of a `cond` or a loop, or a tensor that such a sub-graph holds."""
    value = operator.attrgetter(str(node.target))(module)
    if isinstance(value, fx.GraphModule):
        return Graph(value)
    raise UnsupportedGraphError(f"a {type(value).__name__} of its own ({node.target})")


def _check_value(node: fx.Node) -> None:
    """Raise UnsupportedGraphError where a node takes or makes what no program of the device can hold."""
    for each in (*node.all_input_nodes, node):
        for value in jax.tree.leaves(each.meta.get("val")):
            if isinstance(value, torch.Tensor) and value.device.type != "tpu":
                raise UnsupportedGraphError(f"{each.name} is on {value.device}")
            if isinstance(value, torch.Tensor) and value.dtype is torch.complex32:
                raise UnsupportedGraphError(f"{each.name} is {value.dtype}, which JAX lacks")
            if each.op == "placeholder" and not isinstance(value, (torch.Tensor, torch.SymInt, int)):
                raise UnsupportedGraphError(f"input {each.name} is a {type(value).__name__}")
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target_platform() == "tpu":
        name = functional_name(target._schema)
        tensors = jax.tree.leaves(
            [node.meta.get("val"), [each.meta.get("val") for each in node.all_input_nodes]]
        )
        dtypes = [jax_dtype(value.dtype) for value in tensors if isinstance(value, torch.Tensor)]
        if name is not None and not registry.TABLE[name].compiles_on_tpu(dtypes):
            raise UnsupportedGraphError(f"{target} does not compile for a TPU")


def _own_name(schema: torch._C.FunctionSchema) -> str | None:
    """Operators that are not ATen's (of `jax_op`) are in the table by their qualified name."""
    return schema.name if schema.name in registry.TABLE else None


class _Call:
    """A lowering of the table, with the dtype rules that hold for recorded operations."""

    def __init__(self, node: fx.Node, entry: registry.Lowering):
        self.node, self.entry = node, entry
        schema = node.target._schema  # type: ignore[union-attr]
        self.arguments = [(a.name, str(a.real_type), a.kwarg_only) for a in schema.arguments]
        self.returns = len(schema.returns)
        self.default_dtype = torch.get_default_dtype()  # Dynamo makes another graph where it changes
        self.is_list = self.returns == 1 and str(schema.returns[0].type) == "List[Tensor]"

    def __call__(self, args: Any, kwargs: Any, specs: Any, symbols: Symbols, take_key: Any) -> Any:
        out = tuple(jax.tree.leaves(specs, is_leaf=lambda spec: spec is None))
        arrays = [leaf for leaf in (*out, *jax.tree.leaves((args, kwargs))) if hasattr(leaf, "dtype")]
        wide = any(leaf.dtype in ("float64", "complex128") for leaf in arrays) or _is_integral(
            out, jax.tree.leaves((args, kwargs))
        )
        positional, named, dtypes = [], {}, {}
        for position, (name, kind, kwarg_only) in enumerate(self.arguments):
            if position < len(args):
                value = args[position]
            elif name in kwargs:
                value = kwargs[name]
            elif kwarg_only:
                continue
            else:
                value = self.node.target._schema.arguments[position].default_value  # type: ignore[union-attr]
            if kind.endswith("Generator]") and value is not None:
                raise UnsupportedGraphError(f"{self.node.target} with a generator of its own")
            if isinstance(value, jax.Array):
                dtypes[name] = value.dtype
            elif isinstance(value, bool):
                dtypes[name] = jnp.dtype(bool)
            self._require_fit(name, value, out)
            value = self._number(name, kind, value, wide)
            if not kwarg_only:
                positional.append(value)
            elif name not in _DROPPED:
                named[name] = value
        compute = (
            result_type(_examples((self.node.args, self.node.kwargs)), self.default_dtype)
            if self.entry.promote == "inputs"
            else None
        )
        result = next((spec.dtype for spec in out if spec is not None), None)
        if not self.entry.takes(dtypes, result, compute):
            raise registry.NotLoweredError(f"{self.node.target} of dtypes that PyTorch does not take")
        key = take_key() if self.entry.draws else None
        results = registry.apply(self.entry, positional, named, out, compute, key)
        return results if self.returns > 1 or self.is_list else results[0]

    def _require_fit(self, name: str, value: Any, out: Sequence[Any]) -> None:
        """A number that overflows is left to eager mode, which raises in PyTorch's words."""
        fit = self.entry.fits.get(name)
        if fit is None:
            return
        numbers = value if isinstance(value, list | tuple) else [value] * len(out)
        for number, spec in zip(numbers, out):
            if spec is None or not isinstance(number, bool | int | float):
                continue
            dtype = EQUIVALENTS[registry.opmath(spec.dtype) if fit == "opmath" else spec.dtype]
            try:
                _C.check_number(number, dtype)
            except RuntimeError as error:
                raise registry.NotLoweredError(f"{self.node.target}: {error}") from None

    def _number(self, name: str, kind: str, value: Any, wide: bool) -> Any:
        """A number that is an input of the program where it is recorded arrives as an array here too."""
        if isinstance(value, bool | int | float):
            is_scalar = kind in ("number", "Tensor") and name not in self.entry.static
            if name in ("alpha", "beta") and value in (0, 1):
                return value
            if is_scalar or name in self.entry.runtime:
                if isinstance(value, float):
                    return jnp.asarray(value, jnp.float64 if wide else jnp.float32)
                return jnp.asarray(value, jnp.bool_ if isinstance(value, bool) else jnp.int64)
        return value


def _is_integral(out: Any, given: list[Any]) -> bool:
    """Whether floats among the numbers must reach integers exactly (`is_integral` in signature.cpp)."""
    computes = any(spec is not None and not jnp.issubdtype(spec.dtype, jnp.inexact) for spec in out)
    tensors = [leaf for leaf in given if isinstance(leaf, jax.Array) and leaf.ndim > 0]
    return computes and not any(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in tensors)


class _View:
    """A view operation: the slot of its (contiguous) input that the output shows."""

    def __init__(self, node: fx.Node):
        self.node = node

    def __call__(self, args: Any, kwargs: Any, specs: Any, symbols: Symbols, take_key: Any) -> Any:
        base = args[0]
        shown = self.node.target(_stand_in(base), *args[1:], **_kept(kwargs))  # type: ignore[operator]
        if isinstance(shown, torch.Tensor):
            return views.read(base, _geometry(shown), None)
        return [views.read(base, _geometry(each), None) for each in shown]


class _Scatter:
    """`slice_scatter` and its like: a copy of the first argument, in which a view of it is written."""

    def __init__(self, node: fx.Node, view: Any):
        self.node, self.view = node, view

    def __call__(self, args: Any, kwargs: Any, specs: Any, symbols: Symbols, take_key: Any) -> Any:
        base, source, *rest = args
        shown = self.view(_stand_in(base), *rest, **_kept(kwargs))
        value = jnp.broadcast_to(source, shown.shape).astype(base.dtype)
        return views.write(base, _geometry(shown), value, None)


SCATTERS = {
    _aten.slice_scatter.default: _aten.slice.Tensor,
    _aten.select_scatter.default: _aten.select.int,
    _aten.diagonal_scatter.default: _aten.diagonal.default,
    _aten.as_strided_scatter.default: _aten.as_strided.default,
}


def _drawn(name: str) -> Callable[..., Any]:
    def draw(args: Any, kwargs: Any, spec: Any, symbols: Symbols, take_key: Any) -> Any:
        return registry.apply(registry.TABLE[name], [None], {}, (spec,), key=take_key())[0]

    return draw


def _cast_to_output(args: Any, kwargs: Any, spec: Any, *_: Any) -> Any:
    return jnp.broadcast_to(args[1], spec.shape).astype(spec.dtype)


def _same(args: Any, *_: Any) -> Any:
    return args[0]


def _zeros(args: Any, kwargs: Any, spec: Any, *_: Any) -> Any:
    return jnp.zeros(spec.shape, spec.dtype)


def _filled(args: Any, kwargs: Any, spec: Any, *_: Any) -> Any:
    """What PyTorch gives an empty tensor in deterministic mode."""
    if jnp.issubdtype(spec.dtype, jnp.inexact):
        return jnp.full(spec.shape, jnp.nan, spec.dtype)
    return jnp.full(spec.shape, spec.dtype == jnp.bool_ or jnp.iinfo(spec.dtype).max, spec.dtype)


def _reshaped(args: Any, kwargs: Any, spec: Any, *_: Any) -> Any:
    return args[0].reshape(spec.shape)


def _spaced(args: Any, kwargs: Any, spec: Any, *_: Any) -> Any:
    start, _end, step = (*args, 1)[:3]
    return factory.spaced(start, step, (spec,)).astype(spec.dtype)


def _conjugate(args: Any, *_: Any) -> Any:
    return jnp.conj(args[0])


def _negative(args: Any, *_: Any) -> Any:
    return -args[0]


def _assert(args: Any, kwargs: Any, specs: Any, symbols: Symbols, take_key: Any) -> None:
    """aten::_assert_async.msg (condition, message)."""
    require(*args)


# Operations that the device itself serves without the table.
_OWN: dict[Any, Callable[..., Any]] = {
    _aten._assert_async.msg: _assert,
    _aten.copy.default: _cast_to_output,
    _aten.lift_fresh_copy.default: _same,
    _aten.clone.default: _same,
    _aten.alias.default: _same,
    _aten.detach.default: _same,
    _aten.view.default: _reshaped,
    _aten.reshape.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten._reshape_copy.default: _reshaped,
    _aten.arange.start_step: _spaced,
    _aten.arange.start: _spaced,
    _aten._conj.default: _conjugate,  # views with a bit that says so, where they are not evaluated
    _aten._neg_view.default: _negative,
}
_EMPTY = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.empty_permuted.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
_HIGHER_ORDER = control_flow.TABLE | flex_attention.TABLE
_RANDOM = {
    _aten.rand.default: "uniform",
    _aten.rand_like.default: "uniform",
    _aten.randn.default: "normal_functional",
    _aten.randn_like.default: "normal_functional",
}


# ---- what Dynamo knows about a value, for one set of sizes


def concrete(size: Any, symbols: Symbols) -> int:
    """A size of a graph, int or SymInt, where its symbols have these values."""
    if isinstance(size, int):
        return size
    value = size.node.expr.xreplace(symbols)
    if getattr(value, "free_symbols", None):
        raise UnsupportedGraphError(f"a size that only the data decides ({value})")
    return int(value)


def _stand_ins(value: Any, symbols: Symbols) -> Any:
    """Zeros for what a node makes, where only shapes matter."""
    if isinstance(value, (tuple, list)):
        return [_stand_ins(each, symbols) for each in value]
    try:
        spec = specs_of(value, symbols)
    except UnsupportedGraphError:
        return None
    return jnp.zeros(spec.shape, spec.dtype) if isinstance(spec, jax.ShapeDtypeStruct) else spec


def _no_key() -> jax.Array:
    raise AssertionError("a sub-graph that draws random numbers")


def specs_of(value: Any, symbols: Symbols) -> Any:
    """Shapes and dtypes of what a node makes, in its own arrangement; an integer for a size, else None."""
    if isinstance(value, (tuple, list)):
        return [specs_of(each, symbols) for each in value]
    if isinstance(value, torch.Tensor):
        return jax.ShapeDtypeStruct(
            tuple(concrete(size, symbols) for size in value.shape), jax_dtype(value.dtype)
        )
    is_size = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    return concrete(value, symbols) if is_size else None


def _hint(value: Any, dim: int | None) -> int:
    """What a symbolic size was when Dynamo saw it."""
    size = value if dim is None else value.shape[dim]
    if size.node.hint is None:
        raise UnsupportedGraphError(f"a size that only the data decides ({size})")
    return int(size.node.hint)


def _symbols_of(value: Any) -> list[tuple[sympy.Symbol, int | None]]:
    """The symbols that a placeholder shows, each with the dim it is, or None where the value itself is it."""
    if isinstance(value, torch.SymInt):
        return [(value.node.expr, None)] if isinstance(value.node.expr, sympy.Symbol) else []
    if not isinstance(value, torch.Tensor):
        return []
    return [
        (size.node.expr, dim)
        for dim, size in enumerate(list[Any](value.shape))
        if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol)
    ]


def _examples(args: Any) -> list[Any]:
    """A small tensor or a number for each argument of a node that takes part in promotion."""
    found: list[Any] = []
    for leaf in jax.tree.leaves(args):
        value = leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf
        if isinstance(value, torch.Tensor):
            found.append(torch.empty((1,) * value.dim(), dtype=value.dtype))
        elif isinstance(value, (int, float, complex)):
            found.append(value)
    return found


def _stand_in(base: jax.Array) -> torch.Tensor:
    """A contiguous tensor of the shape and dtype of an array, without values."""
    return torch.empty(base.shape, dtype=EQUIVALENTS[base.dtype], device="meta")


def _geometry(shown: torch.Tensor) -> views.Geometry:
    return views.Geometry(
        tuple(shown.shape), tuple(shown.stride()), int(shown.storage_offset()), jax_dtype(shown.dtype)
    )


def _kept(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in _DROPPED}
