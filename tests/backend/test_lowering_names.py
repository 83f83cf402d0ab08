"""Which table entry serves which ATen overload."""

import pytest
import torch

from tpu_backend.lowering import TABLE, functional_name, recordable_overloads
from tpu_backend.lowering.names import HIDDEN_WRITES, overload_name

SCHEMAS = {overload_name(s): s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")}


@pytest.mark.parametrize(
    ("overload", "table_name"),
    [
        ("add.Tensor", "add.Tensor"),
        ("add_.Tensor", "add.Tensor"),
        ("add.out", "add.Tensor"),
        ("add_.Scalar", "add.Scalar"),
        ("max.dim_max", "max.dim"),
        ("arange.out", "arange.out"),
        ("eye.m_out", "eye.m_out"),
        ("normal_", "normal_functional"),
        ("uniform_", "uniform"),
        ("bernoulli_.float", "bernoulli.p"),
        ("random_.from", "random.from"),
        ("fill_.Tensor", "fill.Tensor"),
        ("zero_", "zero"),
        ("index_put_", "index_put"),
        ("__ilshift__.Scalar", "__lshift__.Scalar"),
        ("__irshift__.Tensor", "__rshift__.Tensor"),
        ("_fused_adamw_", "_fused_adamw"),
        ("_fused_adamw_.tensor_lr", "_fused_adamw.tensor_lr"),
        ("_foreach_add_.List", "_foreach_add.List"),
        ("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        ("empty.memory_format", None),
        ("nonzero", None),
        ("expand", None),
    ],
)
def test_overload_is_served_by(overload: str, table_name: str | None) -> None:
    assert functional_name(SCHEMAS[overload]) == table_name


def test_operators_of_other_libraries_are_not_served() -> None:
    assert functional_name(torch._C._jit_get_schemas_for_operator("prims::add")[0]) is None


GONE = ("cholesky",) if hasattr(torch, "bcomplex32") else ()  # since torch 2.14


def test_every_table_name_is_an_aten_overload() -> None:
    assert [
        name
        for name in TABLE
        if name not in SCHEMAS
        and name not in GONE
        and not name.startswith(("tpu::", "tpu_jax::", "tpu_graph::", "tpu_collective::"))
    ] == []


def test_every_operator_of_the_device_itself_has_a_schema() -> None:
    torch.tpu.init()  # which defines them
    for name in (name for name in TABLE if name.startswith(("tpu::", "tpu_collective::"))):
        assert torch._C._jit_get_schemas_for_operator(name), name


def test_no_table_entry_writes_its_arguments_under_its_own_name() -> None:
    """Entries are pure; only an overload whose sole writes are its out arguments may be an entry itself."""
    for name in TABLE.keys() & SCHEMAS.keys():
        written = [a for a in SCHEMAS[name].arguments if a.alias_info and a.alias_info.is_write]
        assert all(argument.is_out for argument in written), name


def test_recordable_overloads_reach_a_backend_kernel_and_name_a_lowering() -> None:
    recordable = recordable_overloads()
    names = [overload for overload, _ in recordable]
    assert names == sorted(set(names))
    assert {table_name for _, table_name in recordable} <= set(TABLE)
    for overload in names:
        assert overload not in HIDDEN_WRITES
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{overload}", "CompositeImplicitAutograd"
        )
    for expected in (
        "mm",
        "mm.out",
        "add_.Tensor",
        "_fused_adamw_",
        "arange.out",
        "index_put_",
        "tril_indices",
    ):
        assert expected in names
    for composite in ("linear", "full", "zeros_like", "native_batch_norm"):
        assert composite not in names


def test_a_served_overload_takes_what_its_lowering_takes() -> None:
    """Out arguments and generators apart, both schemas list the same arguments in the same order."""
    for overload, table_name in recordable_overloads():

        def names(schema: torch._C.FunctionSchema) -> list[str]:
            return [
                a.name
                for a in schema.arguments
                if not a.is_out and a.name not in ("generator", "memory_format")
            ]

        assert names(SCHEMAS[overload]) == names(SCHEMAS[table_name]), overload
