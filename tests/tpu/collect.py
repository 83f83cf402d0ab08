"""Real calls of the lowerings, as shapes and dtypes: what PyTorch's operator databases make of them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.testing._internal.opinfo.core import OpInfo

from tests.backend.lowering_harness import CheckLowerings, check_sample
from tests.tpu.call import Call, is_shape, shape_of
from tpu_backend.lowering import NotLoweredError

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.float16,
    torch.int32,
    torch.bool,
    torch.complex64,
    torch.float64,
)


@dataclass
class CollectCalls(CheckLowerings):
    """A dispatch mode that keeps, of the calls made under it, up to `each` a lowering and dtype."""

    each: int = 1
    calls: dict[tuple[str, str], list[Call]] = field(default_factory=dict)

    def _check(self, name: str, call: Any, expected: list[torch.Tensor | None]) -> None:
        args, kwargs = jax.tree.map(shape_of, (call.args, call.kwargs))
        with jax.enable_x64(True):
            out = tuple(None if value is None else _result_shape(value) for value in expected)
        arrays = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_shape(leaf)]
        dtype = str((arrays or [shape for shape in out if shape is not None])[0].dtype)
        kept = self.calls.setdefault((call.entry.name, dtype), [])
        empty = [position for position, other in enumerate(kept) if other.is_empty()]
        found = Call(call.entry.name, dtype, args, kwargs, out, call.compute_dtype)
        if len(kept) >= self.each and (not empty or found.is_empty()):
            return
        if np.complex128 in found.dtypes():  # ruled out for all lowerings at once
            return
        try:
            with jax.enable_x64(True):
                jax.eval_shape(lambda *values: found.evaluate(list(values)), *found.inputs())
        except NotLoweredError:
            return
        if len(kept) >= self.each:
            del kept[empty[0]]
        kept.append(found)


def _result_shape(value: torch.Tensor) -> jax.ShapeDtypeStruct:
    dtype = (
        jax.numpy.bfloat16
        if value.dtype == torch.bfloat16
        else torch.empty(0, dtype=value.dtype).numpy().dtype
    )
    return jax.ShapeDtypeStruct(tuple(value.shape), dtype)


def collect(
    each: int,
    num_samples: int,
    keeps: Callable[[str], bool] = lambda name: True,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> list[Call]:
    """Up to `each` calls of every lowering and dtype, from the first samples, forward and backward, of every
    database entry whose name `keeps` likes.
    """
    mode = CollectCalls(each=each)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype in dtypes:
            for op in _operators(keeps):
                if dtype in op.supported_dtypes("cpu"):
                    _run_samples(op, dtype, num_samples, mode)
            if dtype.is_floating_point:
                for module in _modules(keeps):
                    _run_module(module, dtype, mode)
                if keeps("fused optimizers"):
                    _run_fused_optimizers(dtype, mode)
    return [call for kept in mode.calls.values() for call in kept]


def _operators(keeps: Callable[[str], bool]) -> Iterator[OpInfo]:
    databases = (
        op_db,
        foreach_unary_op_db,
        foreach_binary_op_db,
        foreach_pointwise_op_db,
        foreach_reduce_op_db,
        foreach_other_op_db,
    )
    for op in itertools.chain(*databases):
        if keeps(op.name) and not op.name.startswith("jiterator"):  # jiterator: CUDA only
            yield op


def _run_samples(op: OpInfo, dtype: torch.dtype, num_samples: int, mode: CollectCalls) -> None:
    torch.manual_seed(0)
    gradient = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradient), num_samples):
            try:
                check_sample(op, sample, mode, gradient)
            except _REFUSED:
                continue
    except _REFUSED:
        return


# What PyTorch raises for a sample that its CPU kernels do not serve.
_REFUSED = (RuntimeError, NotImplementedError, IndexError, ValueError, TypeError, AssertionError)


def _modules(keeps: Callable[[str], bool]) -> Iterator[ModuleInfo]:
    return (module for module in module_db if keeps(module.name))


def _run_module(info: ModuleInfo, dtype: torch.dtype, mode: CollectCalls) -> None:
    if dtype not in info.dtypes:
        return
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True)
    for sample in samples[:2]:
        given = sample.constructor_input
        try:
            module = info.module_cls(*given.args, **given.kwargs).to(dtype)
            with mode:
                result = module(*sample.forward_input.args, **sample.forward_input.kwargs)
                outputs = [leaf for leaf in jax.tree.leaves(result) if isinstance(leaf, torch.Tensor)]
                sum(value.float().sum() for value in outputs if value.requires_grad).backward()
        except (*_REFUSED, AttributeError):
            continue


def _run_fused_optimizers(dtype: torch.dtype, mode: CollectCalls) -> None:
    for kind, options in (
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
    ):
        parameter = torch.nn.Parameter(torch.ones(4, 3, dtype=dtype))
        parameter.grad = torch.ones_like(parameter)
        try:
            with mode:
                kind([parameter], lr=0.1, fused=True, **options).step()
        except _REFUSED:
            continue
