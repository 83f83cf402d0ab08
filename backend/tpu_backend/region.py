"""Regions of a program: functions whose programs are chosen by what they record and declare, and by nothing else.

Outside of a region a segment returns what somebody holds. That is convenient, and differs between processes
that run the same steps: one of them prints, keeps or clones something. A collective that is part of a
segment needs the same program in all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tpu_backend import _C
from tpu_backend.captured import reach

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FUSED = 2


class Region(reach.Wrapper, Generic[_P, _R]):
    """What `torch.tpu.spmd` returns; see there."""

    digests: tuple[str, ...] = ()
    """Of the programs that the last call launched: what other processes find them by."""

    def __init__(
        self, function: Callable[_P, _R], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._given = (list(modules), list(optimizers))
        self._kept: list[Tensor] | None = None  # while it runs

    @property
    def wrapped(self) -> tuple[Any, ...]:
        return (self._function, *self._given[0], *self._given[1])

    def keep(self, *tensors: Tensor) -> None:
        """Declare tensors that the function has computed: they have values after the call.

        Raises RuntimeError outside of a call.
        """
        if self._kept is None:
            raise RuntimeError(f"keep() of the region {self.__name__}: call it inside the function")
        self._kept += tensors

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._kept is not None:  # inside itself
            return self._function(*args, **kwargs)
        index = torch.tpu.current_device()  # type: ignore[attr-defined]
        # A cast of a weight must be the region's own: whether there was one before is a matter of history.
        torch.clear_autocast_cache()
        self._kept = []
        is_region = _C.get_mode() == _FUSED and _C.begin_region(index)
        results = None
        executables = []
        try:
            returned = self._function(*args, **kwargs)
            results = list(_on_device(self._results(args, kwargs, returned)))
        finally:
            self._kept = None
            torch.clear_autocast_cache()
            if is_region:
                executables = _C.end_region(index, results)
        self.digests = tuple(executable.key for executable in executables)
        return returned

    def _results(self, args: Any, kwargs: Any, returned: Any) -> Iterator[Tensor]:
        """What is declared: what it returns and keeps, and what modules and optimizers hold by name."""
        assert self._kept is not None
        yield from self._kept
        found = reach.reached(self)
        given = [*tree_leaves((args, kwargs)), *found.tensors]
        yield from (leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor))
        for module in [*found.modules, *(leaf for leaf in given if isinstance(leaf, nn.Module))]:
            given += module.parameters()
            yield from module.buffers()
        for optimizer in found.optimizers:
            for group in optimizer.param_groups:
                given += group["params"]
            for state in optimizer.state.values():
                yield from (leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))
        for tensor in given:
            if isinstance(tensor, Tensor) and tensor.is_leaf:
                yield tensor.detach()
                if tensor.grad is not None:
                    yield tensor.grad


def _on_device(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The plain dense tensors on the device that these are made of."""
    for tensor in tensors:
        for part in reach.plain(tensor):
            if part.device.type != "tpu":
                continue
            if part.layout == torch.strided:
                yield part
            elif part.layout == torch.sparse_coo:
                yield from (part._indices(), part._values())
