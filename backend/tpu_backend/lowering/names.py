"""Which entry of the lowering table serves which ATen overload: in-place, ``out=`` and functional names are
one op.

What a caller of the table entry must know about outputs: the functional overload returns, in this order, what
the overload itself returns fresh, then the new value of every argument it mutates
(``_native_batch_norm_legit``: three returns, then running_mean and running_var). An ``out=`` overload returns
its out arguments in schema order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from tpu_backend.lowering.registry import TABLE

# Overloads whose kernels write tensors that their schema does not declare as written: a caller that trusts
# the schema would lose the running statistics of batch norm.  They need a hand-written kernel over the
# functional overload.
HIDDEN_WRITES = frozenset(
    {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm", "native_batch_norm.out"}
)

# In-place operators whose functional one is not their name without the underscore behind it.
_DUNDERS = {"__ilshift__": "__lshift__", "__irshift__": "__rshift__"}


def overload_name(schema: torch._C.FunctionSchema) -> str:
    """``aten::add.Tensor`` as the table spells it: ``add.Tensor``."""
    name = schema.name.removeprefix("aten::")
    return f"{name}.{schema.overload_name}" if schema.overload_name else name


def functional_name(schema: torch._C.FunctionSchema) -> str | None:
    """The table entry that computes what this ATen overload computes, or None when the table has none.

    An overload with an entry of its own keeps it; an in-place or ``out=`` overload is served by the
    functional overload with the same arguments (``max.dim_max`` by ``max.dim``, ``bernoulli_.float`` by
    ``bernoulli.p``).
    """
    if not schema.name.startswith("aten::"):
        return None
    own = overload_name(schema)
    if own in TABLE:
        return own
    if not any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments):
        return None
    has_out = any(argument.is_out for argument in schema.arguments)
    if has_out and any(_is_mutated(argument) for argument in schema.arguments):
        return None
    base = schema.name.removeprefix("aten::")
    wanted = _signature(schema.arguments)
    if base in _DUNDERS:
        stems = [_DUNDERS[base]]
    else:
        stems = [base] if has_out else [base.removesuffix("_"), base]
    for stem in stems:
        for candidate in (stem, f"{stem}_functional"):
            for other in _functional_overloads(candidate):
                if _signature(other.arguments) == wanted and overload_name(other) in TABLE:
                    return overload_name(other)
    return None


def recordable_overloads() -> list[tuple[str, str]]:
    """Every ATen overload that should be a recorded operation, as (overload name, table name), sorted.

    Left out: what PyTorch decomposes before any backend (CompositeImplicitAutograd), factories that it makes
    out of ``empty`` and a write, and overloads that write undeclared tensors (``HIDDEN_WRITES``).
    """
    found = []
    for schema in torch._C._jit_get_all_schemas():
        if not schema.name.startswith("aten::"):
            continue
        own = overload_name(schema)
        table_name = functional_name(schema)
        if (
            table_name is None
            or own in HIDDEN_WRITES
            or not torch._C._dispatch_has_kernel(schema_name(schema))
        ):
            continue
        if _has_kernel(schema, "CompositeImplicitAutograd"):
            continue
        takes_device = any(argument.name == "device" for argument in schema.arguments)
        if takes_device and _has_kernel(schema, "CompositeExplicitAutograd"):
            continue
        found.append((own, table_name))
    return sorted(found)


def schema_name(schema: torch._C.FunctionSchema) -> str:
    """``aten::add.Tensor``, as the dispatcher spells it."""
    return f"aten::{overload_name(schema)}"


def _has_kernel(schema: torch._C.FunctionSchema, dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(schema_name(schema), dispatch_key)


def _is_mutated(argument: Any) -> bool:
    return bool(argument.alias_info and argument.alias_info.is_write and not argument.is_out)


def _signature(arguments: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Names and types without out arguments; a Generator is no value, overloads may differ in it."""
    return tuple(
        (argument.name, str(argument.type))
        for argument in arguments
        if not argument.is_out and argument.name not in ("generator", "memory_format")
    )


@cache
def _functional_overloads(base: str) -> list[Any]:
    """Schemas of one operator name that write nothing."""
    return [
        schema
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{base}")
        if not any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
    ]
