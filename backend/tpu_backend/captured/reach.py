"""What a captured function depends on and is not given as an argument: the modules and optimizers that it can
reach, and the entries of their dictionaries that a replay looks at.
"""

from __future__ import annotations

import functools
import gc
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tpu_backend.runtime.user_line import NOT_THE_USERS


class Watched(NamedTuple):
    """An entry of a dictionary or list, or what is in a closure's cell, that must stay as it is; with key
    `...`: a container's length."""

    container: Any
    key: Any
    value: Any
    name: str


class Wrapper(ABC):
    """What is called in place of a function."""

    @property
    @abstractmethod
    def wrapped(self) -> tuple[Any, ...]:
        """The function, and what else is known that it uses."""


class Setting(NamedTuple):
    """A number of an optimizer, or a tensor of one element on the CPU, that may change from step to step."""

    group: dict[str, Any]
    key: str
    name: str

    @property
    def value(self) -> float:
        """What it is now."""
        value = self.group[self.key]
        return value.item() if isinstance(value, Tensor) else value


class Reached(NamedTuple):
    """What a function can reach, and where their names stand: a name may be given to another one."""

    modules: list[nn.Module]
    optimizers: list[Optimizer]
    tensors: list[Tensor]  # that it can name itself
    bindings: list[Watched]


def reached(function: Any) -> Reached:
    """The modules, optimizers and tensors in the closure, defaults, `self` and named globals of a function
    and of the user's functions that it finds there; in plain objects, lists, tuples and dictionaries one
    level deep.
    """
    modules: dict[int, nn.Module] = {}
    optimizers: dict[int, Optimizer] = {}
    tensors: list[Tensor] = []
    bindings: list[Watched] = []
    seen: dict[int, Any] = {}  # held, or an id might be given again

    def visit(value: Any, depth: int) -> None:
        if id(value) in seen or isinstance(value, type | ModuleType | BuiltinFunctionType | str):
            return
        seen[id(value)] = value
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, nn.Module):
            modules[id(value)] = value
        elif isinstance(value, Optimizer):
            optimizers[id(value)] = value
        elif isinstance(value, FunctionType | MethodType | functools.partial | Wrapper):
            visit_all(_named_in(value), 1)
        elif depth > 0:
            visit_all(_items_of(value), depth - 1)

    def visit_all(found: Iterable[Watched], depth: int) -> None:
        for each in found:
            is_kept = isinstance(each.value, nn.Module | Optimizer) or is_number_on_host(each.value)
            if each.container is not None and is_kept:
                bindings.append(each)
            visit(each.value, depth)

    visit(function, 1)
    return Reached(list(modules.values()), list(optimizers.values()), tensors, bindings)


def modules_with(uses: Callable[[list[Tensor]], list[bool]]) -> list[nn.Module]:
    """The modules of this process, by their roots, that hold a tensor of the device for which `uses` is true:
    those that a step used, wherever it has them from.
    """
    kinds, subclasses = set[type](), [nn.Module]
    while subclasses:
        kind = subclasses.pop()
        kinds.add(kind)
        subclasses += [each for each in kind.__subclasses__() if each not in kinds]
    modules = [each for each in gc.get_objects() if type(each) in kinds and "_modules" in vars(each)]
    used: set[int] = set()
    for module in modules:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        parts_of_them = [part for each in tensors if each is not None for part in plain(each)]
        here = [each for each in parts_of_them if each.device.type == "tpu"]
        if any(uses([each for each in here if each.layout == torch.strided])):
            used.add(id(module))
    roots, parts = [], set[int]()
    for module in modules:
        below = [id(each) for each in module.modules() if each is not module]
        if id(module) in used or not used.isdisjoint(below):
            roots.append(module)
            parts.update(below)
    return [module for module in roots if id(module) not in parts]


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that a tensor is made of (a DTensor has no storage of its own): itself, for most."""
    if is_traceable_wrapper_subclass(made_of := cast(Any, tensor)):
        for name in made_of.__tensor_flatten__()[0]:
            yield from plain(getattr(tensor, name))
    else:
        yield tensor


def made_of_others(
    arguments: Iterable[Any], modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]
) -> tuple[str, Tensor] | None:
    """The first tensor among these that is made of other tensors, and what it is called."""
    named = [(f"argument {place}", each) for place, each in enumerate(arguments)]
    for root in modules:
        tensors = [*root.named_parameters(), *root.named_buffers()]
        named += [(f"{type(root).__name__}.{name}", tensor) for name, tensor in tensors]
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            where = f"{type(optimizer).__name__}.param_groups[{number}]['params']"
            named += [(f"{where}[{place}]", each) for place, each in enumerate(group["params"])]
    return next((each for each in named if is_traceable_wrapper_subclass(each[1])), None)


def _unnamed(values: Iterable[Any]) -> Iterator[Watched]:
    return (Watched(None, None, value, "") for value in values)


def _named_in(function: Any) -> Iterator[Watched]:
    """What a function's code can name; the container is None where a name cannot be given to another."""
    if isinstance(function, functools.partial):
        yield from _unnamed((function.func, *function.args, *function.keywords.values()))
        return
    if isinstance(function, Wrapper):
        yield from _unnamed(function.wrapped)
        return
    if isinstance(function, MethodType):
        yield from _unnamed((function.__self__, function.__func__))
        return
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        yield from _unnamed([function])
        return
    if function.__code__.co_filename.startswith(NOT_THE_USERS):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield Watched(cell, name, cell.cell_contents, name)
        except ValueError:  # not yet assigned
            continue
    yield from _unnamed(function.__defaults__ or ())
    yield from _unnamed((function.__kwdefaults__ or {}).values())
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield Watched(function.__globals__, name, function.__globals__[name], name)


def steps_something(function: Any) -> bool:
    """Whether the function's own code calls a `step`, as of an optimizer."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    return isinstance(function, FunctionType) and "step" in _names(function.__code__)


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _items_of(value: Any) -> Iterator[Watched]:
    if isinstance(value, tuple):
        yield from _unnamed(value)
        return
    if isinstance(value, list):
        yield from (
            Watched(value, place, item, f"item {place} of a list") for place, item in enumerate(value)
        )
        return
    items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    kind = type(value).__name__
    for key, item in list(items.items()):
        yield Watched(items, key, item, f"{key!r} of a dictionary" if items is value else f"{kind}.{key}")


def watched_in_modules(modules: Iterable[nn.Module]) -> Iterator[Watched]:
    """Of each module and those below it: whether it trains, what it consists of, how many hooks it has."""
    seen: set[int] = set()
    for root in modules:
        for path, module in root.named_modules(prefix=type(root).__name__):
            if id(module) in seen:
                continue
            seen.add(id(module))
            if "training" in module.__dict__:  # a compiled module asks the one that it wraps
                yield Watched(module.__dict__, "training", module.training, f"{path}.training")
            for attribute in ("_parameters", "_buffers", "_modules"):
                parts = getattr(module, attribute)
                if attribute in module.__dict__:
                    yield Watched(module.__dict__, attribute, parts, f"what {path} consists of")
                yield Watched(parts, ..., len(parts), f"what {path} consists of")
                for name, part in parts.items():
                    yield Watched(parts, name, part, f"{path}.{name}")
            for hooks in (
                module._forward_hooks,
                module._forward_pre_hooks,
                module._backward_hooks,
                module._backward_pre_hooks,
            ):
                yield Watched(hooks, ..., len(hooks), f"the hooks of {path}")
                for number, hook in hooks.items():
                    yield Watched(hooks, number, hook, f"a hook of {path}")


def watched_in_optimizers(optimizers: Iterable[Optimizer]) -> Iterator[Watched]:
    """Of each optimizer: its groups, their settings but for numbers, their parameters and all state."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        groups = optimizer.param_groups
        yield Watched(optimizer.__dict__, "param_groups", groups, f"the groups of {name}")
        yield Watched(groups, ..., len(groups), f"the groups of {name}")
        yield Watched(optimizer.__dict__, "state", optimizer.state, f"the state of {name}")
        yield Watched(optimizer.state, ..., len(optimizer.state), f"the state of {name}")
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
            yield Watched(hooks, ..., len(hooks), f"the hooks of {name}")
            for number, hook in hooks.items():
                yield Watched(hooks, number, hook, f"a hook of {name}")
        for number, group in enumerate(groups):
            where = f"{name}.param_groups[{number}]"
            yield Watched(groups, number, group, where)
            yield Watched(group["params"], ..., len(group["params"]), f"{where}['params']")
            for place, parameter in enumerate(group["params"]):
                yield Watched(group["params"], place, parameter, f"{where}['params'][{place}]")
                if parameter not in optimizer.state:
                    continue
                state = optimizer.state[parameter]
                yield Watched(optimizer.state, parameter, state, f"the state of a parameter in {name}")
                yield Watched(state, ..., len(state), f"the state of a parameter in {name}")
                for key, value in state.items():
                    yield Watched(state, key, value, f"the {key} of a parameter in {name}")
            for key, value in group.items():
                if not (is_number(value) or is_number_on_host(value)):
                    yield Watched(group, key, value, f"{where}[{key!r}]")


def settings_of(optimizers: Iterable[Optimizer]) -> list[Setting]:
    """The numbers in the groups of optimizers: learning rates and the like."""
    return [
        Setting(group, key, f"{type(optimizer).__name__}.param_groups[{number}][{key!r}]")
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if is_number(value) or is_number_on_host(value)
    ]


def numbers_on_host(tensors: Iterable[Tensor], modules: Iterable[nn.Module]) -> list[Setting]:
    """The tensors among these that operations of the device take for numbers."""
    named = [("a tensor on the CPU", tensor) for tensor in tensors]
    for root in modules:
        held = [*root.named_parameters(), *root.named_buffers()]
        named += [(f"{type(root).__name__}.{name}", tensor) for name, tensor in held]
    return [Setting({name: tensor}, name, name) for name, tensor in named if is_number_on_host(tensor)]


def state_on_host(optimizers: Iterable[Optimizer]) -> str | None:
    """The first tensor that an optimizer keeps on the host, where a replay would not change it."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.device.type == "cpu":
                    return f"{key!r} of {type(optimizer).__name__}"
    return None


def host_versions(modules: Iterable[nn.Module]) -> dict[str, tuple[int, int]]:
    """Which tensors modules keep on the host, and how often each was written: a replay would not do it."""
    return {
        f"{type(root).__name__}.{name}": (id(tensor), tensor._version)
        for root in modules
        for name, tensor in [*root.named_parameters(), *root.named_buffers()]
        if tensor.device.type == "cpu" and not tensor.is_inference()
    }


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_number_on_host(value: Any) -> bool:
    """Whether it is a tensor on the CPU whose one element operations of the device take for a number."""
    return (
        isinstance(value, Tensor)
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and value.numel() == 1
        and not value.is_complex()
    )
