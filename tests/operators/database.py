"""PyTorch's databases as a flat list of entries: what there is to measure, and the denominator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

DATABASES = ("op_db", "foreach", "module_db", "optim_db")
DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "bool", "complex64")


@dataclass(frozen=True)
class Entry:
    """One entry of a database in one dtype; ``variant`` tells apart the entries of one name."""

    database: str
    name: str
    variant: str
    dtype: str

    @property
    def key(self) -> str:
        return " ".join((self.database, self.name, self.variant or "-", self.dtype))

    @staticmethod
    def from_key(key: str) -> Entry:
        database, name, variant, dtype = key.split(" ")
        return Entry(database, name, "" if variant == "-" else variant, dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@cache
def _infos(database: str) -> dict[tuple[str, str], Any]:
    """Info objects by (name, variant)."""
    if database == "op_db":
        from torch.testing._internal.common_methods_invocations import op_db

        listed = [(op.name, op.variant_test_name, op) for op in op_db]
    elif database == "foreach":
        from torch.testing._internal import common_methods_invocations as invocations

        families = ("unary", "binary", "pointwise", "reduce", "other")
        listed = [
            (op.name, op.variant_test_name, op)
            for family in families
            for op in getattr(invocations, f"foreach_{family}_op_db")
        ]
    elif database == "module_db":
        from torch.testing._internal.common_modules import module_db

        listed = [(module.name, "", module) for module in module_db]
    elif database == "optim_db":
        from torch.testing._internal.common_optimizers import optim_db

        listed = [(optimizer.optim_cls.__name__, "", optimizer) for optimizer in optim_db]
    else:
        raise ValueError(f"no database {database!r}: expected one of {', '.join(DATABASES)}")
    infos: dict[tuple[str, str], Any] = {}
    for name, variant, info in listed:
        while (name, variant) in infos:  # a few entries of op_db share name and variant
            variant += "'"
        infos[name, variant] = info
    return infos


def info_of(entry: Entry) -> Any:
    return _infos(entry.database)[entry.name, entry.variant]


def _supports(database: str, info: Any, dtype: torch.dtype) -> bool:
    if database == "optim_db":
        return dtype.is_floating_point or (dtype.is_complex and info.supports_complex)
    return dtype in info.supported_dtypes("cpu")


def entries(database: str, dtype: str) -> list[Entry]:
    """What the CPU declares to support in this dtype.

    Whether it does is found when the samples run: an entry of which the CPU serves none is not counted.
    """
    return [
        Entry(database, name, variant, dtype)
        for (name, variant), info in _infos(database).items()
        if _supports(database, info, getattr(torch, dtype))
    ]
