"""How the phases of a run execute: the mode of the device, and the model as it is or compiled."""

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn

from tputrain import device as devices
from tputrain.announce import say
from tputrain.config_checks import Settings, expect, expect_at_least, expect_choice
from tputrain.models.recompute import offloads

FORMS = ("debug", "strict", "fused", "compile", "captured")
_IN_PARTS = "fused in parts"  # the form of first steps (torch.tpu.eager_mode)
_PREPARED_AT = 2  # steps in parts: then a thread begins to compile the one program that follows
_ONE_PROGRAM = ("fused", "captured")  # made of what is recorded op by op: these begin in parts
_RECOMPILE_LIMIT = 64  # forms of a model that Dynamo keeps: sizes of batches, training and evaluation
# Each size has a program of its own whatever was seen before: a resumed run runs the same programs.
_OPTIONS: dict[str, Any] = {"dynamic": False, "recompile_limit": _RECOMPILE_LIMIT}


@dataclass(frozen=True)
class ExecutionConfig(Settings):
    """How each phase executes on the tpu device.

    - debug: an operation at a time, waiting for each.
    - strict: a program an operation.
    - fused: a program a step.
    - compile: a program a step through torch.compile.
    - captured: fused; once a step was recorded twice alike, it is launched without any Python. Training only.
    """

    train: str = "fused"
    """Training steps."""
    validate: str = "fused"
    """Evaluations."""
    sample: str = "fused"
    """Text from the model."""
    first_steps: int = 32
    """Steps of a run, from 0, in which fused steps run in parts, which equal layers share. They begin soon;
    meanwhile a thread compiles the programs that follow. A resumed run changes over at the same step."""
    autocast: str | None = None
    """bfloat16: products of matrices in bfloat16, what needs more in float32, by PyTorch's autocast; weights,
    their gradients and the optimizer's state stay float32. None: everything in the weights' own dtype."""

    executable_cache: str | None = None
    """Directory where later processes find the programs that this one compiles; none: they are not kept.
    None: as TPU_CACHE_DIR says, and where that says nothing in ~/.cache/tputrain/executables."""

    def __post_init__(self) -> None:
        expect(
            self.executable_cache not in ("", "False", "True", "off", "on"),
            "execution.executable_cache",
            self.executable_cache,
            f"a directory, or none; left out, it is {devices.EXECUTABLE_CACHE}",
        )
        if self.autocast is not None:
            expect_choice("execution.autocast", self.autocast, ("bfloat16",))
        expect_at_least("execution.first_steps", self.first_steps, 0)
        _expect_form("execution.train", self.train, FORMS)
        for phase in ("validate", "sample"):  # which need no gradients, and so little of the host
            name, form = f"execution.{phase}", getattr(self, phase)
            expect(form != "captured", name, form, "fused, or compile: captured is a form of training steps")
            _expect_form(name, form, tuple(each for each in FORMS if each != "captured"))


def _expect_form(name: str, form: str, choices: tuple[str, ...]) -> None:
    gone = "auto is gone: fused, the default, was never slower"
    expect(form != "auto", name, form, f"one of {', '.join(choices)}; {gone}")
    expect_choice(name, form, choices)


class Execution:
    """Says in which form each phase runs, and where its programs are kept. On another device than tpu, debug,
    strict, fused and captured are one.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        cfg: ExecutionConfig,
        steps_done: Callable[[], int] = lambda: sys.maxsize,
        last_step: int = sys.maxsize,
        on_any_rank: Callable[[bool], bool] = bool,
    ):
        """`on_any_rank(x)`: whether x is so on some rank; all ask in the same order."""
        devices.use_executable_cache(device, cfg.executable_cache)
        self._is_by_block = False
        self._model, self._device, self._cfg, self._steps_done = model, device, cfg, steps_done
        self._on_any_rank = on_any_rank
        # In parts a layer's input crosses programs, and the host cannot keep it.
        self._first_steps = 0 if offloads(model) else cfg.first_steps
        self._prepares_whole = last_step > self._first_steps
        self._form = cfg.train
        self._mode: tuple[str, str] | None = None  # of the device, and whether it runs in parts
        self._forms_trained: set[str] = set()
        self._num_in_parts = 0  # steps trained in this process
        self._seen: set[Hashable] = set()

    @property
    def model(self) -> nn.Module:
        """The model as the current phase calls it."""
        return self._compiled if self._form == "compile" and not self._is_by_block else self._model

    @property
    def autocast(self) -> str | None:
        """The dtype that products of matrices are cast to; None: that of the weights."""
        return self._cfg.autocast

    @property
    def first_of(self) -> str:
        """What a first step is the first of, for people."""
        return "of this process" if len(self._forms_trained) <= 1 else f"that is {self._form}"

    @cached_property
    def _compiled(self) -> Any:
        return torch.compile(self._model, **_OPTIONS)

    def compile_block(self, block: nn.Module) -> None:
        """Compile this part of the model by itself, and not all of it at once: between parts the weights that
        ranks share out come and go.
        """
        self._is_by_block = True
        plain = block.forward

        @cache
        def compiled() -> Any:  # only if it is called: this imports all of the compiler
            return torch.compile(plain, **_OPTIONS)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return (compiled() if self._form == "compile" else plain)(*args, **kwargs)

        block.forward = forward

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """In here train, validate or sample goes on."""
        with self.in_form(self._form_of(name)):
            yield

    def _form_of(self, name: str) -> str:
        form: str = getattr(self._cfg, name)
        return _IN_PARTS if form in _ONE_PROGRAM and self._is_early(self._steps_done()) else form

    def _is_early(self, step: int) -> bool:
        """Whether the step after `step` is one of the first; on another device than tpu there are none."""
        return self._device.type == "tpu" and step < self._first_steps

    @contextmanager
    def in_form(self, form: str) -> Iterator[None]:
        """In here the model runs in one of FORMS, or in parts."""
        outer = self._form, self._mode
        self._form, self._mode = form, self._mode_for(form)
        try:
            with devices.execution_mode(self._device, *self._mode), devices.exact_sizes(self._device):
                yield
        finally:
            self._form, self._mode = outer

    def _mode_for(self, form: str) -> tuple[str, str]:
        if form == _IN_PARTS:
            return "fused", "prepare" if self._prepares_whole else "always"
        return form if form in ("debug", "strict") else "fused", "never"

    def _change_to(self, form: str) -> None:
        """From here on to the end of the phase it has this form."""
        self._form, mode = form, self._mode_for(form)
        if mode != self._mode:
            devices.execution_mode(self._device, *mode)  # sets it; the phase's own context takes it back
            self._mode = mode

    @property
    def captures_training(self) -> bool:
        """Whether it ever does what `captures` says."""
        return self._cfg.train == "captured" and self._device.type == "tpu"

    @property
    def captures(self) -> bool:
        """Whether the current phase's step is replayed once it was recorded."""
        return self._form == "captured" and self.captures_training

    @property
    def compiles(self) -> bool:
        """Whether what the current phase runs for the first time is compiled."""
        return self._device.type == "tpu" or self._form == "compile"

    def is_new(self, name: str, batches: Hashable = None) -> bool:
        """Whether phase `name` has not run in its present form, with `batches` of this form."""
        return (name, self._form_of(name), batches) not in self._seen

    def has_run(self, name: str, batches: Hashable = None) -> None:
        """Phase `name` ran as `is_new` says."""
        self._seen.add((name, self._form_of(name), batches))

    # -- training, step by step

    def before_step(self) -> bool:
        """Take the form for the next step; whether it is one that this process has not run, and that takes
        its time."""
        form = self._form_of("train")
        is_new = form not in self._forms_trained
        if is_new and form in _ONE_PROGRAM and _IN_PARTS in self._forms_trained:
            was_prepared = self._prepares_whole and self._num_in_parts >= _PREPARED_AT
            is_new = not was_prepared or self._on_any_rank(devices.is_compiling_ahead(self._device))
        self._forms_trained.add(form)
        self._num_in_parts += form == _IN_PARTS
        self._change_to(form)
        return is_new

    def after_step(self) -> None:
        """A step was dispatched; what is computed before the next one has the form of that."""
        self._change_to(self._form_of("train"))

    def end_training(self) -> None:
        """The run has done all its steps: say so where it did not come to what was asked for."""
        if self.captures_training and self._num_in_parts > 0 and self._is_early(self._steps_done() - 1):
            say(
                f"execution.train=captured: not reached, as the first {self._cfg.first_steps} steps of a run "
                "are in parts (execution.first_steps)"
            )
