"""PyTorch's tests name CUDA, NCCL and gloo; their files see the device and its backend under these names.

A test file's text stays as it is. What it calls `torch`, `dist` and so on becomes a view of the real module:
`torch.cuda` is `torch.tpu`, a CUDA device is this rank's one device, and the backend "nccl" is "tpu". Or
"gloo" is, and tensors that a test makes without saying where are on the device, too.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

DEVICE = torch.device("tpu", 0)
_NUMBERED = (torch.Tensor.to, torch.Tensor.cuda)  # a number among their arguments is a device


def device_of(name: Any) -> Any:
    """This rank's device, if that is what a test means by `name`: "cuda:3", or a number."""
    if isinstance(name, torch.device):
        return DEVICE if name.type in ("cuda", "tpu") else name
    if isinstance(name, str):
        return DEVICE if name.partition(":")[0] == "cuda" else name
    if isinstance(name, int) and not isinstance(name, bool):
        return DEVICE
    return name


def _argument(value: Any) -> Any:
    return device_of(value) if isinstance(value, (torch.device, str)) else value


class OnDevice(TorchFunctionMode):
    """What is created on, or moved to, a CUDA device is created on this rank's device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        convert = device_of if func in _NUMBERED else _argument
        keywords = {
            key: device_of(value) if key == "device" else value for key, value in (kwargs or {}).items()
        }
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        return func(*(args[:1] + tuple(map(convert, args[1:]))), **keywords)


class _DeviceType(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        first = device_of(args[0]) if args else None
        return first if first is DEVICE else torch.device(*args, **kwargs)


class Device(metaclass=_DeviceType):
    """`torch.device`."""


class View(ModuleType):
    """A module in which some names mean something else."""

    def __init__(self, module: ModuleType, **names: Any):
        super().__init__(module.__name__)
        self.__dict__.update(names, _module=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)


def _renamed(function: Callable[..., Any], backends: set[str]) -> Callable[..., Any]:
    """Takes the device's backend for those of these names."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        def convert(value: Any) -> Any:
            return "tpu" if isinstance(value, str) and value in backends else value

        return function(*map(convert, args), **{key: convert(value) for key, value in kwargs.items()})

    return call


_make_parallel = nn.parallel.DistributedDataParallel.__init__
_make_mesh = dist.device_mesh.init_device_mesh


def _parallel(
    self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *rest: Any, **kw: Any
) -> None:
    """A rank has one device, number 0."""
    ids = device_ids and [device_of(each) for each in device_ids]
    output = None if output_device is None else device_of(output_device)
    _make_parallel(self, module, ids, output, *rest, **kw)


def _mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
    return _make_mesh("tpu" if device_type == "cuda" else device_type, *args, **kwargs)


def install(world_size: int, backend: str) -> None:
    """In this process, for what all test files use; the device's backend has the name `backend`."""
    import torch.testing._internal.common_distributed as common

    cuda = View(
        torch.tpu,  # type: ignore[attr-defined]
        is_available=lambda: True,
        device_count=lambda: world_size,  # each rank has one
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda device=None: torch.tpu.synchronize(),  # type: ignore[attr-defined]
        amp=torch.cuda.amp,
        nccl=View(torch.cuda.nccl, version=lambda: (2, 27, 0)),
    )
    views = {
        "torch.cuda": cuda,
        "torch.distributed": View(
            dist,
            **{
                name: _renamed(getattr(dist, name), {"nccl", backend})
                for name in (
                    "init_process_group",
                    "new_group",
                    "new_subgroups",
                    "new_subgroups_by_enumeration",
                )
            },
            is_nccl_available=lambda: True,
        ),
    }
    views["torch"] = View(
        torch, cuda=cuda, distributed=views["torch.distributed"], device=Device, autocast=torch.autocast
    )
    _views.update(views)
    torch.nn.Module.cuda = lambda self, device=None: self.to(DEVICE)  # type: ignore[method-assign,assignment]
    nn.parallel.DistributedDataParallel.__init__ = _parallel  # type: ignore[method-assign]
    dist.device_mesh.init_device_mesh = _mesh  # type: ignore[assignment]
    common.TEST_CUDA = common.HAS_ACCELERATOR = True
    show(common)
    OnDevice().__enter__()
    if backend == "gloo":
        torch.set_default_device(DEVICE)


_views: dict[str, ModuleType] = {}
_AUTOCAST = {
    "autocast": functools.partial(torch.autocast, "tpu"),
    "GradScaler": functools.partial(torch.amp.GradScaler, "tpu"),
}


@contextmanager
def asked_at_import(world_size: int) -> Iterator[None]:
    """In here PyTorch says that it has NCCL, and a CUDA device for each rank. For decorators of tests, which
    ask before `show` can be called.
    """
    answers = {
        (torch.cuda, "is_available"): lambda: True,
        (torch.cuda, "device_count"): lambda: world_size,
        (torch.cuda.nccl, "version"): lambda: (2, 27, 0),
        (dist, "is_nccl_available"): lambda: True,
    }
    before = {(module, name): getattr(module, name) for module, name in answers}
    for (module, name), answer in answers.items():
        setattr(module, name, answer)
    try:
        yield
    finally:
        for (module, name), answer in before.items():
            setattr(module, name, answer)


def show(module: ModuleType) -> None:
    """Have a module see the views, and what it imported by name from `torch.cuda.amp`."""
    for name, value in list(vars(module).items()):
        if isinstance(value, ModuleType) and value.__name__ in _views:
            setattr(module, name, _views[value.__name__])
        elif name.endswith("PROFILING_SUPPORTED_BACKENDS"):
            value.append("tpu")
        elif name in _AUTOCAST and getattr(value, "__module__", "").startswith("torch.cuda.amp"):
            setattr(module, name, _AUTOCAST[name])
    sys.modules.setdefault(module.__name__, module)
