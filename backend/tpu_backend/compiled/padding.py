"""Which symbolic sizes of a graph may be rounded up, so that a few programs serve all of them.

A size may be padded where each row along it is computed from the same rows of the inputs and from nothing
else: the rows that are added change none that are kept. They repeat the last row, so that whatever holds of
the rows (an index in range, a divisor that is not zero) holds of them too.

The rules below are an allow-list. Sums over the size, its use as a number, random numbers, a reshape that
merges it with another dim: a program a size, as it would be without padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import sympy
import torch
from torch import fx

_aten = torch.ops.aten


def paddable_sizes(nodes: Sequence[fx.Node]) -> set[sympy.Symbol]:
    """The symbols of a graph that may be padded."""
    exprs = [expr for node in nodes for value in _tensors(node) for expr in _exprs(value)]
    symbols = {expr for expr in exprs if isinstance(expr, sympy.Symbol)}
    return {symbol for symbol in symbols if all(_keeps_rows(node, symbol) for node in nodes)}


def padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """A tensor whose last row along `dim` is repeated up to this size."""
    missing = size - tensor.shape[dim]
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, last.expand(shape)], dim) if missing else tensor


def place_of(value: torch.Tensor, symbol: sympy.Symbol) -> int | None:
    """The dim of a traced tensor that has this symbolic size."""
    exprs = _exprs(value)
    return exprs.index(symbol) if symbol in exprs else None


# ---- does an operation keep the rows along a size apart?


def _keeps_rows(node: fx.Node, symbol: sympy.Symbol) -> bool:
    values = [value for each in (*node.all_input_nodes, node) for value in _tensors(each)]
    if not all(_has_at_most_once(value, symbol) for value in values):
        return False
    number = node.meta.get("val")
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):  # only the size itself
        return symbol not in number.node.expr.free_symbols or number.node.expr == symbol
    if node.op == "output":
        return all(value.is_contiguous() for each in node.all_input_nodes for value in _tensors(each))
    if node.op == "placeholder" or node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    uses_as_number = any(_is_size(each, symbol) for each in node.all_input_nodes)
    if not uses_as_number and not any(symbol in _exprs(value) for value in values):
        return True
    if uses_as_number and node.target not in _TAKE_SHAPES:
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    if torch.Tag.pointwise in node.target.tags:
        return _is_aligned(node, symbol)
    rule = _RULES.get(node.target)
    return rule is not None and rule(node, symbol)


def _is_size(node: fx.Node, symbol: sympy.Symbol) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and symbol in value.node.expr.free_symbols


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [value for value in jax.tree.leaves(node.meta.get("val")) if isinstance(value, torch.Tensor)]


def _exprs(value: torch.Tensor) -> list[Any]:
    sizes: list[Any] = list(value.shape)
    return [size.node.expr if isinstance(size, torch.SymInt) else size for size in sizes]


def _has_at_most_once(value: torch.Tensor, symbol: sympy.Symbol) -> bool:
    exprs = _exprs(value)
    mixed = [each for each in exprs if each != symbol and symbol in getattr(each, "free_symbols", ())]
    return not mixed and exprs.count(symbol) <= 1


def _is_aligned(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether broadcasting aligns the size in all inputs with where the output has it."""
    values = [value for each in (*node.all_input_nodes, node) for value in _tensors(each)]
    from_right = {len(exprs) - exprs.index(symbol) for value in values if symbol in (exprs := _exprs(value))}
    return len(from_right) == 1 and all(symbol in _exprs(value) for value in _tensors(node))


def _moves(node: fx.Node, symbol: sympy.Symbol) -> bool:
    return all(symbol in _exprs(value) for value in _tensors(node))


def _reshapes(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether the dims before it, and those behind it, are as many elements as they were."""
    before, after = _exprs(node.all_input_nodes[0].meta["val"]), _exprs(node.meta["val"])
    if symbol not in before or symbol not in after:
        return False
    old, new = before.index(symbol), after.index(symbol)
    return sympy.prod(before[:old]) == sympy.prod(after[:new]) and (
        sympy.prod(before[old:]) == sympy.prod(after[new:])
    )


def _multiplies(node: fx.Node, symbol: sympy.Symbol) -> bool:
    """Whether a matrix product does not sum over it."""
    left, right = (_exprs(each.meta["val"]) for each in node.args[-2:])  # type: ignore[union-attr]
    bias = [_exprs(each.meta["val"]) for each in node.args[:-2]]  # type: ignore[union-attr]
    return left[-1] != symbol and right[-2] != symbol and not any(symbol in each for each in bias)


def _reduces(dims: Callable[[fx.Node], Any]) -> Callable[[fx.Node, sympy.Symbol], bool]:
    """Whether a reduction over the dims that are an argument leaves the size alone."""

    def rule(node: fx.Node, symbol: sympy.Symbol) -> bool:
        exprs = _exprs(node.args[0].meta["val"])  # type: ignore[union-attr]
        named = dims(node)
        reduced = [named] if isinstance(named, int) else named
        if not reduced or symbol not in exprs:  # none named: all
            return False
        return exprs.index(symbol) not in [dim % len(exprs) for dim in reduced]

    return rule


def _normalizes(node: fx.Node, symbol: sympy.Symbol) -> bool:
    value, shape = node.args[:2]
    rows = _exprs(value.meta["val"])  # type: ignore[union-attr]
    return symbol in rows[: len(rows) - len(shape)]  # type: ignore[arg-type]


def _looks_up(node: fx.Node, symbol: sympy.Symbol) -> bool:
    return symbol not in _exprs(node.args[0].meta["val"])  # type: ignore[union-attr]


def _second(node: fx.Node) -> Any:
    return node.args[1] if len(node.args) > 1 else None


_TAKE_SHAPES = {
    _aten.view.default,
    _aten.reshape.default,
    _aten._unsafe_view.default,
    _aten.expand.default,
    _aten.full.default,
    _aten.sym_size.int,
}
_RULES: Mapping[Any, Callable[[fx.Node, sympy.Symbol], bool]] = {
    **dict.fromkeys((_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default), _reshapes),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.addmm.default), _multiplies),
    **dict.fromkeys(
        (
            _aten.permute.default,
            _aten.transpose.int,
            _aten.t.default,
            _aten.unsqueeze.default,
            _aten.squeeze.dim,
            _aten.alias.default,
            _aten.detach.default,
            _aten.full.default,
        ),
        _moves,
    ),
    **dict.fromkeys(
        (_aten.expand.default, _aten.clone.default, _aten._to_copy.default, _aten.floor_divide.default),
        _is_aligned,
    ),
    **dict.fromkeys(
        (
            _aten.sum.dim_IntList,
            _aten.mean.dim,
            _aten.amax.default,
            _aten.amin.default,
            _aten.argmax.default,
            _aten.argmin.default,
            _aten._softmax.default,
            _aten._log_softmax.default,
            _aten.var.correction,
            _aten.cumsum.default,
        ),
        _reduces(_second),
    ),
    _aten.native_layer_norm.default: _normalizes,
    _aten.embedding.default: _looks_up,
}
