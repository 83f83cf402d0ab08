"""Many processes, one device each: the c10d backend "tpu".

`install` makes it known to `torch.distributed` when torch is imported. A first group starts JAX's runtime in
this process as one of many (`start.py`); each group is a `ProcessGroup` of csrc/distributed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch._C._distributed_c10d import Backend, ProcessGroup

from tpu_backend.after_import import after_import
from tpu_backend.distributed import fsdp, grids, launched, local_rank


def install() -> None:
    """Register the backend with torch.distributed, once somebody imports that."""
    from tpu_backend import _C

    launched.mark()
    if launched.is_spawned():
        _C.mark_as_one_of_many()
    os.register_at_fork(after_in_child=_C.mark_as_one_of_many)
    after_import("torch.distributed.distributed_c10d", _register)
    after_import("torch.distributed.device_mesh", grids.watch)
    after_import("torch.nn.parallel.distributed", local_rank.accept_in_ddp)
    after_import("torch.distributed.fsdp._fully_shard._fsdp_collectives", fsdp.install)


def _register(c10d: ModuleType) -> None:
    if "tpu" in c10d.Backend.backend_list:
        return
    c10d.Backend.register_backend("tpu", _make_group, extended_api=True, devices=["tpu"])
    # What PyTorch asks of a backend that can be split, and what its class for those in C++ does not have.
    for name, value in (("options", None), ("perform_nocolor_split", lambda self, device: None)):
        if not hasattr(Backend, name):
            setattr(Backend, name, value)
    c10d._new_process_group_helper = _with_default(c10d._new_process_group_helper)  # type: ignore[attr-defined]
    local_rank.accept_in_group(c10d)


def _with_default(make: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch takes gloo for the default backend of a group unless it is one of its own, and DDP asks the
    default: where there is no gloo, it raises.
    """

    @functools.wraps(make)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        group = made[0]
        if isinstance(group, ProcessGroup) and torch.device("tpu") in group._device_types:
            group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        return made

    return make_group


def _make_group(options: Any, backend_options: Any) -> Any:
    """The backend of one group, for `torch.distributed`; the world's comes first."""
    from tpu_backend import _C
    from tpu_backend.distributed import start

    seconds = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        ranks = list(range(options.group_size))
        start.start(options.store, options.group_rank, options.group_size, seconds)
    return _C.make_process_group(options.group_rank, ranks, seconds)
