"""A step that is run by Python until it has been recorded twice alike, and from then on launched from C++.

There were three ways. To trace the function, as `torch.compile` does, sees its Python, and stops at an
optimizer's or a hook's. To keep static memory for inputs and results, as CUDA's graphs do, makes the user
copy into it. Here what two ordinary calls recorded is compared: the program, the storages that it read and
wrote, the numbers that it took. What is alike in both is what a replay does again; all that differs must be
an argument, a number of an optimizer, or random. Inside another captured step one is a function like any
other.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar
from weakref import ReferenceType

import torch
from jax.tree_util import PyTreeDef, tree_flatten, tree_structure, tree_unflatten
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpu_backend import _C
from tpu_backend.captured import reach
from tpu_backend.captured.numbers import Changes, ProgramNumber, is_same
from tpu_backend.exact_key import exact_key
from tpu_backend.runtime.signature import signature
from tpu_backend.runtime.user_line import first_line, line_of

log = logging.getLogger("tpu_backend.compile")

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FUSED = 2  # the mode in which a step is one program
_PATIENCE = (
    3  # calls in a row that are refused for one reason before a warning: the first ones compile, make state
)
_MANY = 24  # calls in a row that are run for whatever reasons before a warning
_KEPT = 8  # steps, of other shapes say, that can be replayed at a time


class _Recording(NamedTuple):
    """A call that was recorded, whole and in one program."""

    step: _C.RecordedStep
    arguments: PyTreeDef
    result: PyTreeDef
    constants: tuple[Any, ...]  # what was returned: None where a tensor is
    settings: list[reach.Setting]
    changes: Changes


class _Replayable(NamedTuple):
    step: _C.RecordedStep
    arguments: PyTreeDef
    result: PyTreeDef
    constants: tuple[Any, ...] | None  # None: all that is returned are tensors
    is_flat: bool  # the arguments: by position, each a leaf
    returns_tensor: bool  # one, and nothing else
    watched: list[reach.Watched]
    gradients: list[int | None]  # of what is watched, by their identities
    keeps_gradient: list[bool]  # whether the call left the one that was there, and no new one


class CapturedStep(reach.Wrapper, Generic[_P, _R]):
    """What `torch.tpu.capture` returns; see there."""

    problem: str | None
    """Why the last call was not a replay; None where it was one."""

    def __init__(
        self, function: Callable[_P, _R], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
    ):
        functools.update_wrapper(self, function)
        self._function = function
        self._given = (list(modules), list(optimizers))
        self._noticed: list[Optimizer] = []
        self._current: _Replayable | None = None
        self._replayable: dict[Any, _Replayable] = {}  # by form of the arguments
        self._last: dict[Any, _Recording] = {}
        self._forgets = False
        self._refused: dict[
            Any, tuple[str, int]
        ] = {}  # by form: why its last calls were not replayed, and how many
        self._num_by_python = 0  # calls in a row
        self._num_again: Counter[Any] = Counter()  # of them: recorded again, by form and reason
        self._num_warned = 0
        self._has_stepped = False  # an optimizer, in some call
        self._said: Counter[str] = Counter()  # what was logged
        self.problem = _NOT_CALLED

    @property
    def wrapped(self) -> tuple[Any, ...]:
        return (self._function, *self._given[0], *self._given[1])

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Of a method: each object has a step of its own, which stands among its attributes from then on."""
        if instance is None:
            return self
        bound = CapturedStep(MethodType(self._function, instance), *self._given)
        vars(instance)[self._function.__name__] = bound
        return bound

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        current = self._current
        if current is not None:
            is_flat = current.is_flat and not kwargs  # how many, and that each is a leaf, replay finds out
            leaves, tree = (args, None) if is_flat else tree_flatten((args, kwargs))
            if is_flat or tree == current.arguments:
                results = current.step.replay(leaves)
                if isinstance(results, list):
                    self.problem, self._num_by_python = None, 0
                    return _returned(current, results)
                self.problem = _reason(current, results)
        return self._call_otherwise(args, kwargs)

    def _call_otherwise(self, args: Any, kwargs: Any) -> _R:
        """By another recording than the last, or by Python."""
        leaves, tree = tree_flatten((args, kwargs))
        if getattr(_under_way, "is_any", False):
            self.problem = _INSIDE
            return self._function(*args, **kwargs)
        if self._is_elsewhere(leaves):
            self.problem = _ELSEWHERE
            return self._run(args, kwargs)
        _check(leaves)
        if _C.get_mode() != _FUSED:
            self.problem = _NOT_FUSED
            return self._run(args, kwargs)
        form = _form(leaves, tree)
        other = self._replayable.get(form)
        if other is not None and other is not self._current:
            results = other.step.replay(leaves)
            if isinstance(results, list):
                self._current, self.problem, self._num_by_python = other, None, 0
                return _returned(other, results)
            self.problem = _reason(other, results)
        if other is not None:
            self._log("is recorded again: %s", self.problem)
        return self._record(form, leaves, tree, args, kwargs)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Call the function. The graph behind its result, which nobody gets, is gone by the end."""
        _under_way.is_any = True
        try:
            return _detached(self._function(*args, **kwargs))
        finally:
            _under_way.is_any = False

    def _is_elsewhere(self, leaves: list[Any]) -> bool:
        """Whether this is a script that now trains on the CPU, say: it takes tensors, has modules or
        optimizers, and none of all those tensors is on the device."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or _is_any_here(tensors):
            return False
        found = reach.reached(self)
        modules = [*found.modules, *_modules_among(leaves)]
        parameters = [parameter for module in modules for parameter in module.parameters()]
        groups = [group for optimizer in found.optimizers for group in optimizer.param_groups]
        parameters += [parameter for group in groups for parameter in group["params"]]
        return bool(parameters) and not _is_any_here(parameters)

    @property
    def _name(self) -> str:
        code = getattr(self._function, "__code__", None)
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"

    def _record(self, form: Any, leaves: list[Any], tree: PyTreeDef, args: Any, kwargs: Any) -> _R:
        self._current = None
        self._replayable.pop(form, None)
        before = self._last.pop(form, None)
        why = self.problem
        self._num_by_python += 1
        if self._num_by_python == 1:
            self._num_again.clear()
        if self._num_by_python == _MANY:
            warnings.warn(
                f"torch.tpu.capture: {self._name} was run by Python {_MANY} times in a row, the last time "
                f"since {why}; calls that are alike but for tensors, floats and random numbers are replayed, "
                f"of at most {_KEPT} shapes, dtypes and constants in turns",
                UserWarning,
                stacklevel=4,
            )
        found = reach.reached(self)
        modules = [*found.modules, *_modules_among(leaves)]
        optimizers = list(found.optimizers)
        optimizers += [each for each in self._noticed if not any(each is other for other in optimizers)]
        if (problem := _problem_of_subclasses(leaves, modules, optimizers)) is not None:
            self._tell(form, problem, why)
            return self._run(args, kwargs)
        on_cpu = reach.numbers_on_host(found.tensors, modules)
        settings = [*reach.settings_of(optimizers), *on_cpu]
        numbers = [setting.value for setting in settings]
        on_host = reach.host_versions(modules)
        requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves]
        gradients = _gradients_of(modules, optimizers)
        torch.clear_autocast_cache()  # a weight's cast must be the step's own, and is not to outlive it
        step = _C.RecordedStep(torch.tpu.current_device())  # type: ignore[attr-defined]
        try:
            with self._noticing(optimizers):
                returned, result_tree = tree_flatten(self._run(args, kwargs))
            torch.clear_autocast_cache()
            problem = _finish(step, leaves, returned)
        finally:
            step.abandon()
        problem = _problem_of_arguments(leaves, requires_grad) or problem
        now = [*reach.settings_of(optimizers), *on_cpu]
        if problem is None:
            problem = (
                _problem_of_modules(modules, on_host)
                or _problem_of_optimizers(optimizers, settings, numbers, now)
                or _problem_of_gradients(leaves, step)
            )
        if problem is None:
            host = [*numbers, *_numbers_of(leaves)]
            program = [ProgramNumber(*number) for number in step.numbers()]
            constants = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in returned)
            recording = _Recording(step, tree, result_tree, constants, settings, Changes(program, host))
            recording, problem = _compared(before, recording, program, host)
            self._last[form] = recording
            if problem == _FIRST and self._forgets:
                problem = _FORGOTTEN
            while len(self._last) > _KEPT:
                del self._last[next(iter(self._last))]
                self._forgets = True
            used = [] if problem is not None else reach.modules_with(step.uses)
            problem = problem or _problem_of_subclasses([], used, [])
            if problem is None:
                watched = [
                    *found.bindings,
                    *reach.watched_in_modules([*modules, *used]),
                    *reach.watched_in_optimizers(optimizers),
                ]
                self._replay_from_now(form, recording, watched, gradients, host)
                self._warn_if_none_stepped(found.optimizers, leaves)
        self._tell(form, problem, why)
        return tree_unflatten(result_tree, returned)

    def _replay_from_now(
        self,
        form: Any,
        recording: _Recording,
        watched: list[reach.Watched],
        gradients: _Gradients,
        host: list[float],
    ) -> None:
        """`gradients`: those before the call."""
        keeps_gradient = [_keeps_gradient(each.value, gradients) for each in watched]
        recording.step.make_replayable(
            [(*each[:3], keeps) for each, keeps in zip(watched, keeps_gradient, strict=True)],
            [(setting.group, setting.key) for setting in recording.settings],
            [float(value) for value in host],
            recording.changes.may_change,
            recording.changes.bindings(),
        )
        has_constants = (
            any(constant is not None for constant in recording.constants) or not recording.constants
        )
        self._current = self._replayable[form] = _Replayable(
            recording.step,
            recording.arguments,
            recording.result,
            recording.constants if has_constants else None,
            recording.arguments == tree_structure(((0,) * recording.arguments.num_leaves, {})),
            recording.result == _LEAF and not has_constants,
            watched,
            [_gradient(each.value) for each in watched],
            keeps_gradient,
        )
        while len(self._replayable) > _KEPT:
            oldest = next(iter(self._replayable))
            del self._replayable[oldest]
            self._last.pop(oldest, None)

    def _log(self, message: str, argument: str | None = None) -> None:
        """Say something of this step, but not the same in every call of a long run."""
        text = message if argument is None else message % argument
        self._said[text] += 1
        if self._said[text] <= _PATIENCE:
            log.info("captured step %s %s", self._name, text)

    def _tell(self, form: Any, problem: str | None, why: str | None) -> None:
        """`why`: this call was no replay."""
        if problem is None:
            self._log("is recorded: the next call is a replay")
            self.problem = "it was recorded: the next call is a replay"
            self._refused.pop(form, None)
            if why not in _NO_REPLAY_BEFORE:
                self.problem = f"it was recorded again, since {why}"
                self._num_again[form, why] += 1
                if self._num_again[form, why] == _PATIENCE:
                    self._warn(why)
            return
        self.problem = problem
        self._log("is not replayed: %s", problem)
        before, times = self._refused.pop(form, (problem, 0))
        self._refused[form] = (problem, times + 1 if before == problem else 1)
        while len(self._refused) > _KEPT:
            del self._refused[next(iter(self._refused))]
        if self._refused[form] == (problem, _PATIENCE):
            self._warn(problem)

    def _warn_if_none_stepped(self, optimizers: list[Optimizer], leaves: list[Any]) -> None:
        """Where a call was like the one before in that no optimizer stepped, later ones may be meant to."""
        is_told_apart = not all(isinstance(leaf, Tensor | float) for leaf in leaves)
        if self._has_stepped or is_told_apart or not optimizers or not torch.is_grad_enabled():
            return
        if reach.steps_something(self._function):
            warnings.warn(
                f"torch.tpu.capture: {self._name} is replayed from now on as two calls did it, in which no "
                "optimizer stepped: if one is to step in later calls (to accumulate gradients, say), put all "
                "of them into one function",
                UserWarning,
                stacklevel=5,
            )

    @contextmanager
    def _noticing(self, optimizers: list[Optimizer]) -> Any:
        """Optimizers that step in here are added, and noticed for the calls to come."""

        def notice(optimizer: Optimizer, *_: object) -> None:
            self._has_stepped = True
            if not any(optimizer is each for each in optimizers):
                optimizers.append(optimizer)
                self._noticed.append(optimizer)

        hook = register_optimizer_step_pre_hook(notice)
        try:
            yield
        finally:
            hook.remove()

    def _warn(self, problem: str | None) -> None:
        self._num_warned += 1
        if self._num_warned > _PATIENCE:
            return
        warnings.warn(
            f"torch.tpu.capture: {self._name} is run by Python each time: {problem}",
            UserWarning,
            stacklevel=6,
        )


_LEAF = tree_structure(0)
_under_way = threading.local()  # is_any: this thread is in a captured function
_NOT_CALLED = "it was not called yet"
_FIRST = "it was recorded for the first time"
_FORGOTTEN = f"it was recorded for the first time, or is none of the last {_KEPT} shapes and constants"
_ELSEWHERE = "none of its arguments and parameters is on the device"
_NOT_FUSED = "the eager mode is not fused"
_INSIDE = "it was called inside another captured step, which does its work too"
_NO_REPLAY_BEFORE = (_NOT_CALLED, _FIRST, _FORGOTTEN, _ELSEWHERE, _NOT_FUSED, _INSIDE)


def capture(
    function: Callable[_P, _R] | None = None,
    *,
    modules: Sequence[nn.Module] = (),
    optimizers: Sequence[Optimizer] = (),
) -> Any:
    """See `torch.tpu.capture`."""
    if function is None:
        return functools.partial(capture, modules=modules, optimizers=optimizers)
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise TypeError(f"torch.tpu.capture: expected a function, got {function!r}")
    for name, given, kind in (("modules", modules, nn.Module), ("optimizers", optimizers, Optimizer)):
        is_list = isinstance(given, Collection) and not isinstance(given, nn.Module)
        if not is_list or not all(isinstance(each, kind) for each in given):
            raise TypeError(f"torch.tpu.capture: {name}: expected a list of {kind.__name__}s, got {given!r}")
    return CapturedStep(function, modules, optimizers)


def _returned(replayable: _Replayable, results: list[Tensor]) -> Any:
    if replayable.returns_tensor:
        return results[0]
    if replayable.constants is not None:
        tensors = iter(results)
        results = [next(tensors) if each is None else each for each in replayable.constants]
    return tree_unflatten(replayable.result, results)


def _reason(replayable: _Replayable, found: str | int) -> str:
    if isinstance(found, str):
        return found
    watched, before = replayable.watched[found], replayable.gradients[found]
    now = _gradient(watched.value)
    if now is None and before is not None:
        advice = "call zero_grad() inside the step, or with set_to_none=False"
        return f"the gradient of {watched.name} was taken away: {advice}"
    if now is not None and before is None:
        return f"{watched.name} has a gradient, and had none"
    if now != before and replayable.keeps_gradient[found]:
        return f"the gradient of {watched.name} is another tensor: write the one that was there in place"
    return f"{watched.name} changed"


_Gradients = dict[int, ReferenceType[Tensor]]
"""Of parameters, by their identities."""


def _gradients_of(modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> _Gradients:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    parameters += [parameter for group in groups for parameter in group["params"]]
    return {id(each): ReferenceType(each.grad) for each in parameters if each.grad is not None}


def _keeps_gradient(value: Any, before: _Gradients) -> bool:
    """Whether a parameter has the gradient that it had: the call adds to that, or leaves it alone."""
    return id(value) in before and _gradient(value) is not None and before[id(value)]() is value.grad


def _gradient(value: Any) -> int | None:
    return id(value.grad) if isinstance(value, nn.Parameter) and value.grad is not None else None


def _numbers_of(leaves: Sequence[Any]) -> Iterator[float]:
    """The numbers among arguments, and where in its storage each tensor begins."""
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield int(leaf.storage_offset())
        elif reach.is_number(leaf):
            yield leaf


def _modules_among(leaves: Sequence[Any]) -> Iterator[nn.Module]:
    return (leaf for leaf in leaves if isinstance(leaf, nn.Module))


def _is_any_here(tensors: Iterable[Tensor]) -> bool:
    return any(tensor.device.type == "tpu" for tensor in tensors)


def _check(leaves: Sequence[Any]) -> None:
    """Raises TypeError for a tensor that is not on the device."""
    for place, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device.type != "tpu":
            raise TypeError(
                f"torch.tpu.capture: argument {place} is a tensor on {leaf.device}, and a captured step "
                'takes tensors on the device: move it first, batch.to("tpu")'
            )
        if leaf.layout != torch.strided:
            raise TypeError(f"torch.tpu.capture: argument {place} is {leaf.layout}, and must be strided")


def _form(leaves: Sequence[Any], tree: PyTreeDef) -> Any:
    """What one program can serve, as far as the arguments and PyTorch's modes tell."""
    kinds = [
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else exact_key(leaf)
        if isinstance(leaf, int | str)
        else type(leaf)
        for leaf in leaves
    ]
    return tree, tuple(kinds), _C.guards()


def _detached(result: Any) -> Any:
    leaves, tree = tree_flatten(result)
    return tree_unflatten(tree, [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _finish(step: _C.RecordedStep, leaves: list[Any], returned: Sequence[Any]) -> str | None:
    """End a recording; returns why the step cannot be replayed."""
    if (subclass := reach.made_of_others(returned, (), ())) is not None:
        return f"it returns a {type(subclass[1]).__name__}, which is made of other tensors: return those"
    for leaf in returned:
        if isinstance(leaf, Tensor) and (leaf.device.type != "tpu" or leaf.layout != torch.strided):
            return f"it returns a {leaf.layout} tensor on {leaf.device}"
        if not isinstance(leaf, Tensor | int | float | str):
            return (
                f"it returns a {type(leaf).__name__}, and may return tensors, numbers and text, in tuples, "
                "lists and dictionaries"
            )
    problem = step.finish(leaves, [leaf for leaf in returned if isinstance(leaf, Tensor)])
    return None if problem is None else _told(*problem)


def _told(text: str, advice: str, number: int, code: CodeType | None, lasti: int) -> str:
    """A problem with the operator at fault, or with the line, and with what to do."""
    if number >= 0:
        text = f"{text}: {signature(number).overload}, first met at {first_line(number)}"
    elif code is not None:
        text = f"{text}, at {line_of(code, lasti)}"
    return f"{text}: {advice}" if advice else text


def _problem_of_optimizers(
    optimizers: Sequence[Optimizer],
    settings: Sequence[reach.Setting],
    numbers: Sequence[float],
    now: Sequence[reach.Setting],
) -> str | None:
    if (where := reach.state_on_host(optimizers)) is not None:
        return f"{where} is kept on the host: make the optimizer with fused=True or capturable=True"
    if len(now) != len(settings):
        return "its optimizers were not known before"
    for setting, before in zip(settings, numbers, strict=True):
        if not is_same(setting.value, before):
            return f"it changes {setting.name} itself: set it before the call"
    return None


def _problem_of_subclasses(
    leaves: Sequence[Any], modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> str | None:
    if (found := reach.made_of_others(leaves, modules, optimizers)) is None:
        return None
    name, tensor = found
    return (
        f"{name} is a {type(tensor).__name__}, whose values are in other tensors: capture a function of "
        "plain tensors (to_local() of a DTensor), or call this one without torch.tpu.capture"
    )


def _problem_of_arguments(leaves: Sequence[Any], requires_grad: Sequence[bool]) -> str | None:
    for leaf, before in zip(leaves, requires_grad, strict=True):
        if isinstance(leaf, Tensor) and leaf.requires_grad != before:
            form = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            now = (
                "requires a gradient, and did not" if leaf.requires_grad else "requires no gradient, and did"
            )
            return (
                f"it leaves an argument ({form}) that {now} before, by requires_grad_() or a write in place: "
                "detach() what it changes or writes"
            )
    return None


def _problem_of_gradients(leaves: Sequence[Any], step: _C.RecordedStep) -> str | None:
    for place, leaf in enumerate(leaves):
        gradient = leaf.grad if isinstance(leaf, Tensor) and leaf.is_leaf else None
        if gradient is None or gradient.device.type != "tpu" or gradient.layout != torch.strided:
            continue
        if any(step.uses([gradient])):
            return (
                f"it reads or leaves a gradient in argument {place}, where a replay would find none: "
                "return it, as torch.autograd.grad gives it"
            )
    return None


def _problem_of_modules(modules: Sequence[nn.Module], on_host: dict[str, tuple[int, int]]) -> str | None:
    for name, version in reach.host_versions(modules).items():
        if on_host.get(name, version) != version:
            return f"it changes {name}, which is on the host: move it to the device, or change it outside"
    for root in modules:
        for name, module in root.named_modules(prefix=type(root).__name__):
            if isinstance(module, torch.jit.ScriptModule):
                return f"{name} is a module of TorchScript, of which cannot be seen whether it changes"
    return None


def _compared(
    before: _Recording | None, recording: _Recording, program: list[ProgramNumber], host: list[float]
) -> tuple[_Recording, str | None]:
    """The recording with what the one before it tells, and why it cannot be replayed."""
    if before is None or len(before.settings) != len(recording.settings):
        return recording, _FIRST
    if (difference := recording.step.difference(before.step)) is not None:
        return recording, _told(*difference)
    if before.result != recording.result or exact_key(before.constants) != exact_key(recording.constants):
        return recording, "what it returns beside tensors changes from call to call"
    strange = before.changes.learn(program, host)
    if strange is not None:
        taker = "a slice" if strange.taker < 0 else signature(strange.taker).overload
        line = "" if strange.taker < 0 else f", first met at {first_line(strange.taker)}"
        return recording, (
            f"a number that {taker} takes changes from call to call, and is neither an "
            f"argument nor a setting of an optimizer{line}"
        )
    return recording._replace(changes=before.changes), None
