"""Regions: functions whose programs are chosen by what they record and declare, and by nothing else.

Outside of a region a segment returns what somebody holds. That is convenient, and differs between processes
that run the same steps: one of them prints, keeps or clones something. A collective that is part of a
segment needs the same program in all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tpu_backend import _C
from tpu_backend.captured import reach
from tpu_backend.distributed import agreement

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FUSED = 2
_PLAIN = (Tensor, nn.Parameter)


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
        self._name = getattr(function, "__qualname__", type(function).__name__)
        self._kept: list[Tensor] | None = None  # while it runs

    @property
    def wrapped(self) -> tuple[Any, ...]:
        return (self._function, *self._given[0], *self._given[1])

    def keep(self, *tensors: Tensor) -> None:
        """Declare tensors that the function has computed: they have values after the call.

        Raises RuntimeError outside of a call.
        """
        if self._kept is None:
            raise RuntimeError(f"keep() of the region {self._name}: call it inside the function")
        self._kept += tensors

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if self._kept is not None:  # inside itself
            return self._function(*args, **kwargs)
        index = torch.tpu.current_device()  # type: ignore[attr-defined]
        # A cast of a weight must be the region's own: whether there was one before is a matter of history.
        torch.clear_autocast_cache()
        unsettled = self._settle_buckets(tree_leaves((args, kwargs)))
        is_region = _C.get_mode() == _FUSED and _C.begin_region(index)
        self._kept = []
        executables = []
        try:
            returned = self._function(*args, **kwargs)
            results = self._results(tree_leaves((args, kwargs)), returned)
        except BaseException as error:
            self._leave()
            if is_region:
                self._end_with(error, index)
            raise
        self._leave()
        if is_region:
            has_new_buckets = any(module._has_rebuilt_buckets for module in unsettled)
            executables = _C.end_region(index, results, has_new_buckets)
        self.digests = tuple(executable.key for executable in executables)
        return returned

    def _leave(self) -> None:
        self._kept = None
        torch.clear_autocast_cache()

    def _end_with(self, error: BaseException, index: int) -> None:
        """End the region as it is. What it has recorded with collectives is launched on no rank: the others
        may not have raised, and would be waited for.
        """
        why = f"the region {self._name} raised {type(error).__name__}: nothing of this call has a value"
        with agreement.launching_nothing(why):
            try:
                _C.end_region(index, None, False)
            except RuntimeError as told:
                if why not in str(told):
                    error.add_note(f"the region could not be ended: {told}")

    def _settle_buckets(self, given: Sequence[Any]) -> list[DistributedDataParallel]:
        """DDP makes its buckets anew in the forward pass after its first backward pass, and keeps them. It is
        to do so before the region. Returns those that may still do so inside, in a first step of several
        forward passes: such buckets are no declared results, yet the next call reads them.
        """
        if not torch.distributed.is_initialized() or not torch.is_grad_enabled():
            return []
        modules = (module for root in self._reached(given).modules for module in root.modules())
        found = [module for module in modules if isinstance(module, DistributedDataParallel)]
        for module in found:
            module.reducer._rebuild_buckets()
        return [module for module in found if not module._has_rebuilt_buckets]

    def _reached(self, given: Sequence[Any]) -> reach.Reached:
        """By its function, and by what a call gives it, which is looked into like what a closure holds."""
        return reach.reached(functools.partial(self, *given))

    def _results(self, given: Sequence[Any], returned: Any) -> list[Tensor]:
        """What is declared: what it returns and keeps, and what modules and optimizers hold by name."""
        assert self._kept is not None
        found = self._reached(given)
        groups = [group for optimizer in found.optimizers for group in optimizer.param_groups]
        states = [state for optimizer in found.optimizers for state in optimizer.state.values()]
        leaves = list(found.tensors)
        leaves += [parameter for module in found.modules for parameter in module.parameters()]
        leaves += [parameter for group in groups for parameter in group["params"]]
        held: list[Any] = [leaf.grad for leaf in leaves if leaf.is_leaf]
        for part in (part for module in found.modules for part in module.modules()):
            held += part._buffers.values()
            # transformers' rotary embeddings keep frequencies so that a forward pass has computed
            held += [value for value in vars(part).values() if type(value) is Tensor]
        held += [value for state in states for value in state.values()]
        held += [*self._kept, *tree_leaves(returned)]
        return [part for each in held if isinstance(each, Tensor) for part in _parts(each)]


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """The plain dense tensors on the device that this one is made of."""
    if type(tensor) not in _PLAIN:
        return [part for whole in reach.plain(tensor) if whole is not tensor for part in _parts(whole)]
    if tensor.device.type != "tpu":
        return ()
    if tensor.layout == torch.strided:
        return (tensor,)
    return (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else ()
