"""Checks lowerings against PyTorch's CPU kernels: every ATen call that the table serves, wherever it comes
from.

``CheckLowerings`` is a dispatch mode: code that runs under it (an OpInfo sample, forward and backward, a
whole model) runs on the CPU as usual, and each ATen call is evaluated a second time by its lowering under
``jax.jit``, on copies of the inputs, and compared in shape, dtype and value. No device is needed.

As a script it sweeps PyTorch's operator database and prints one line an operator that fails:

    python tests/backend/lowering_harness.py [--dtype float32] [--samples 3] [--only softmax] [--no-grad]
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._python_dispatch import TorchDispatchMode

from tests.backend.quick_xla import quick_xla
from tpu_backend.lowering import TABLE, Lowering, NotLoweredError, apply, functional_name
from tpu_backend.lowering.names import overload_name

# Wider than torch's defaults where float32 sums run in another order.
_TOLERANCE = {
    torch.float32: (2e-5, 2e-5),
    torch.float64: (1e-7, 1e-7),
    torch.bfloat16: (1.6e-2, 1e-2),
    torch.float16: (2e-3, 2e-3),
    torch.complex64: (2e-5, 2e-5),
}


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """A copy on the JAX side; views are materialised. Needs ``jax.enable_x64``."""
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16))
    return jnp.asarray(tensor.numpy())


def to_torch(array: jax.Array) -> torch.Tensor:
    host = np.array(array)
    if host.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(host.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(host)


@functools.cache
def _jax_dtype(dtype: torch.dtype) -> Any:
    return (
        np.dtype(ml_dtypes.bfloat16) if dtype == torch.bfloat16 else torch.empty(0, dtype=dtype).numpy().dtype
    )


@functools.cache
def _schema_of(table_name: str) -> Any:
    base = table_name.partition(".")[0]
    for schema in torch._C._jit_get_schemas_for_operator(f"aten::{base}"):
        if overload_name(schema) == table_name:
            return schema
    raise KeyError(table_name)


@dataclass
class _Call:
    """One ATen call as the runtime would hand it to a lowering."""

    entry: Lowering
    args: list[Any]
    kwargs: dict[str, Any]
    compute_dtype: Any

    def evaluate(self, out: tuple[jax.ShapeDtypeStruct | None, ...]) -> tuple[jax.Array | None, ...]:
        leaves, tree = jax.tree.flatten((self.args, self.kwargs), is_leaf=lambda leaf: leaf is None)
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
        static = tuple(_ARRAY if isinstance(leaf, jax.Array) else (type(leaf), leaf) for leaf in leaves)
        return _compiled(self.entry, tree, static, out, self.compute_dtype)(arrays)


_ARRAY = object()


@functools.cache
def _compiled(
    entry: Lowering, tree: Any, static: tuple, out: tuple, compute_dtype: Any
) -> Callable[[list], tuple]:
    """One jitted function a distinct call; repeated layers and steps reuse it."""

    def run(arrays: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        values = iter(arrays)
        args, kwargs = jax.tree.unflatten(
            tree, [next(values) if leaf is _ARRAY else leaf[1] for leaf in static]
        )
        return apply(entry, args, kwargs, out, compute_dtype, jax.random.key(0) if entry.draws else None)

    return jax.jit(run, compiler_options=quick_xla())


def _runtime_scalar(value: Any) -> Any:
    """0 and 1 stay Python numbers, as the runtime leaves them; other numbers are inputs of the program."""
    return value if value in (0, 1) else jnp.asarray(value)


def _prepare(table_name: str, given: dict[str, Any]) -> _Call:
    entry = TABLE[table_name]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    tensors: list[Any] = []
    for argument in _schema_of(table_name).arguments:
        if argument.is_out:
            continue
        value = given.get(argument.name, argument.default_value)
        kind = str(argument.type)
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            value = to_jax(value)
        elif isinstance(value, (list, tuple)) and "Tensor" in kind:
            tensors.extend(item for item in value if item is not None)
            value = [None if item is None else to_jax(item) for item in value]
        elif argument.name in ("device", "layout", "memory_format", "generator"):
            value = None
        elif value is not None and (
            argument.name in entry.runtime or ("number" in kind and argument.name not in entry.static)
        ):
            tensors.extend(value if isinstance(value, (list, tuple)) else [value])
            value = (
                [_runtime_scalar(v) for v in value]
                if isinstance(value, (list, tuple))
                else _runtime_scalar(value)
            )
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    compute_dtype = functools.reduce(_result_type, tensors, None) if entry.promote == "inputs" else None
    return _Call(entry, args, kwargs, None if compute_dtype is None else _jax_dtype(compute_dtype.dtype))


def _result_type(left: torch.Tensor | None, right: Any) -> torch.Tensor:
    """Keeps a tensor (0-d stays 0-d) that promotes like everything seen so far."""
    if left is None:
        return right if isinstance(right, torch.Tensor) else torch.tensor(right)
    dtype = torch.result_type(left, right)
    ndim = max(left.ndim, right.ndim if isinstance(right, torch.Tensor) else 0)
    return torch.empty((1,) * ndim, dtype=dtype)


def _flat_tensors(values: Iterable[Any]) -> list[torch.Tensor | None]:
    return [leaf for value in values for leaf in (value if isinstance(value, (list, tuple)) else [value])]


@dataclass
class CheckLowerings(TorchDispatchMode):
    """Counts in ``checked``, texts in ``failures``; ``declined`` counts calls that raised NotLoweredError."""

    skip: frozenset[str] = frozenset()
    checked: collections.Counter[str] = field(default_factory=collections.Counter)
    declined: collections.Counter[str] = field(default_factory=collections.Counter)
    unserved: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        table_name = functional_name(schema)
        if table_name is None or table_name in self.skip:
            if schema.name.startswith("aten::") and not func.is_view:
                self.unserved[overload_name(schema)] += 1
            return func(*args, **kwargs)
        defaults = {argument.name: argument.default_value for argument in schema.arguments}
        given = defaults | dict(zip(defaults, args)) | kwargs
        with warnings.catch_warnings(), jax.enable_x64(True):
            warnings.simplefilter("ignore")
            try:
                call = _prepare(table_name, given)
            except (
                TypeError,
                NotImplementedError,
                RuntimeError,
            ):  # a dtype that NumPy has not: not ours to check
                return func(*args, **kwargs)
            result = func(*args, **kwargs)
            self._check(overload_name(schema), call, _outputs(schema, given, result))
        return result

    def _check(self, name: str, call: _Call, expected: list[torch.Tensor | None]) -> None:
        self.checked[call.entry.name] += 1
        try:
            out = tuple(
                None if value is None else jax.ShapeDtypeStruct(tuple(value.shape), _jax_dtype(value.dtype))
                for value in expected
            )
            results = call.evaluate(out)
        except NotLoweredError:
            self.declined[call.entry.name] += 1
            return
        except Exception as error:
            self.failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return
        if call.entry.draws:
            return
        for position, (want, got) in enumerate(zip(expected, results, strict=True)):
            if want is None or got is None:
                continue
            rtol, atol = _TOLERANCE.get(want.dtype, (0, 0))
            want = want.detach().resolve_conj().resolve_neg().contiguous()
            try:
                torch.testing.assert_close(to_torch(got), want, rtol=rtol, atol=atol, equal_nan=True)
            except AssertionError as error:
                text = " ".join(str(error).split())
                self.failures.append(
                    f"{name} output {position} {want.dtype} {tuple(want.shape)}: {text[:160]}"
                )


def _outputs(schema: Any, given: dict[str, Any], result: Any) -> list[torch.Tensor | None]:
    """What the functional overload returns: fresh returns, then the new values of mutated arguments."""
    mutated = [a for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    returns = result if isinstance(result, (list, tuple)) and len(schema.returns) != 1 else [result]
    fresh = [value for value, spec in zip(returns, schema.returns) if spec.alias_info is None]
    values = _flat_tensors([*fresh, *(given[argument.name] for argument in mutated)])
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


def check_sample(op: OpInfo, sample: Any, mode: CheckLowerings, gradient: bool) -> None:
    """Run one OpInfo sample, and its backward where it has one, under the mode."""
    with mode:
        result = op(sample.input, *sample.args, **sample.kwargs)
        if not gradient:
            return
        leaves = [
            leaf for leaf in jax.tree.leaves((sample.input, sample.args, sample.kwargs)) if _wants_grad(leaf)
        ]
        outputs = [leaf for leaf in jax.tree.leaves(result) if _wants_grad(leaf)]
        if leaves and outputs:
            torch.autograd.grad(
                outputs, leaves, [torch.randn_like(value) for value in outputs], allow_unused=True
            )


def _wants_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def check_op(
    op: OpInfo, dtype: torch.dtype, num_samples: int, gradient: bool = True, **options: Any
) -> CheckLowerings:
    """Check the first samples of an operator of PyTorch's database, but those PyTorch itself refuses."""
    mode = CheckLowerings(**options)
    torch.manual_seed(0)
    differentiable = gradient and op.supports_autograd and dtype.is_floating_point
    samples = op.sample_inputs("cpu", dtype, requires_grad=differentiable)
    for sample in itertools.islice(samples, num_samples):
        try:
            check_sample(op, sample, mode, differentiable)
        except (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError):
            continue
    return mode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--no-grad", action="store_true")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th operator, from the i-th")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    start, step = (int(number) for number in options.part.split("/"))
    checked: collections.Counter[str] = collections.Counter()
    declined: collections.Counter[str] = collections.Counter()
    unserved: collections.Counter[str] = collections.Counter()
    passed = failed = 0
    for op in list(op_db)[start::step]:
        if op.name.startswith("jiterator"):  # CUDA only
            continue
        if options.only not in op.name or dtype not in op.supported_dtypes("cpu"):
            continue
        mode = check_op(op, dtype, options.samples, not options.no_grad)
        checked += mode.checked
        declined += mode.declined
        unserved += mode.unserved
        if mode.failures:
            failed += 1
            print(
                f"FAIL {op.name} {op.variant_test_name}: {mode.failures[0]} (+{len(mode.failures) - 1})",
                flush=True,
            )
        else:
            passed += 1
    print(f"{passed} operators pass, {failed} fail; {len(checked)} of {len(TABLE)} lowerings checked")
    print("declined:", dict(declined))
    print("not in the table:", dict(unserved.most_common()))


if __name__ == "__main__":
    main()
