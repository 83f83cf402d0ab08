"""The half of the device that needs JAX; imported at the first use of a tpu tensor."""

from __future__ import annotations

import atexit
import inspect
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tpu_backend.collector import importing
from tpu_backend.interrupts import keep_from_collector, keeps_interrupts

with importing():
    from tpu_backend import _C, assertions, composite, data_dependent, environment, vocabulary_loss
    from tpu_backend.distributed import ending, operators, region_programs, start, waiting
    from tpu_backend.lowering import names, registry
    from tpu_backend.lowering.collectives import NAMESPACE
    from tpu_backend.runtime import compiler, mappings, platform, shapes, transfer, user_line
    from tpu_backend.runtime.debug import after_debug_op
    from tpu_backend.runtime.memory import describe_shortage
    from tpu_backend.runtime.program_key import flags
    from tpu_backend.runtime.range_errors import raise_range_error
    from tpu_backend.runtime.segment import trace_form
    from tpu_backend.untraced import untraced

_once = threading.Lock()

# PyTorch makes these out of storage operations, which share values instead of computing them.
_STORAGE_OPS = frozenset({"aten::clone"})


def lowered_ops() -> list[tuple[str, str, list[str], list[str], list[str], int, dict[str, Any]]]:
    """What the recorder serves: overload, table name, static, runtime and unread arguments, random
    numbers it draws, numbers that must fit a dtype.
    """
    ops = []
    served = [(f"aten::{overload}", table_name) for overload, table_name in names.recordable_overloads()]
    own = [(name, name) for name in registry.TABLE if name.startswith(("tpu::", f"{NAMESPACE}::"))]
    for overload, table_name in [*served, *own]:
        if overload in _STORAGE_OPS or torch._C._dispatch_has_kernel_for_dispatch_key(
            overload, "PrivateUse1"
        ):
            continue  # a hand-written kernel of csrc
        entry = registry.TABLE[table_name]
        ops.append(
            (
                overload,
                table_name,
                sorted(entry.static),
                sorted(entry.runtime),
                _unread(entry),
                entry.draws,
                dict(entry.fits),
            )
        )
    return ops


def _unread(entry: registry.Lowering) -> list[str]:
    """Arguments whose contents the lowering ignores: their parameter starts with an underscore."""
    return [name[1:] for name in inspect.signature(entry.function).parameters if name.startswith("_")]


@untraced
@keeps_interrupts
def initialize() -> None:
    """Start JAX, say what "tpu" is here, and register every lowered op with PyTorch's dispatcher.
    Idempotent.
    """
    with _once:
        if _C.is_initialized():
            return
        environment.check_environment()
        _check_no_worker()
        compiler.configure_logging()
        start.start_if_launched(user_line.user_line())
        platform.announce()
        flags()  # as XLA has just read them
        keep_from_collector()
        shapes.register_meta_kernels()
        data_dependent.register()
        assertions.register()
        vocabulary_loss.register()
        operators.register()
        composite.register()
        transfer.spend_read_only_warning()
        # JAX warns at each fork, as DataLoader's workers are made.  Those leave the device alone, and
        # whoever does not
        # is told so by the device itself (csrc/record/stream.cpp, check_not_forked).
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        callbacks: dict[str, Callable[..., Any]] = {
            "trace_form": keeps_interrupts(trace_form),
            "agree": keeps_interrupts(region_programs.agree),
            "plan": keeps_interrupts(compiler.plan_segment),
            "compile": keeps_interrupts(compiler.compile_segment),
            "prepare": keeps_interrupts(compiler.prepare_segment),
            "is_room_short": mappings.is_room_short,
            "put_numbers": transfer.put_numbers,
            "put": transfer.put,
            "copy": transfer.copy,
            "get": waiting.watched(transfer.get),
            "wait": waiting.watched(transfer.wait),
            "after_debug_op": keeps_interrupts(after_debug_op),
            "describe_shortage": describe_shortage,
            "raise_range_error": raise_range_error,
        }
        _C.initialize(
            lowered_ops(),
            {name: untraced(callback) for name, callback in callbacks.items()},
            user_line.NOT_THE_USERS,
        )
        atexit.register(_end)
        ending.note_device(_end)


def _check_no_worker() -> None:
    """A worker's tensors could not be handed over: its loader would stand still."""
    if (worker := get_worker_info()) is not None:
        raise RuntimeError(
            f"the tpu device cannot be used in a DataLoader's worker (number {worker.id}): give out CPU "
            "tensors there, and move each batch to the device in the training loop"
        )


def _end() -> None:
    """Stops launchers, and says what launched programs found wrong that nobody has waited for: then the exit
    code is not 0.
    """
    if _C.is_forked():
        return
    for device in range(_C.device_count()):
        for finish in (_C.stop_launcher, _C.wait_for_launches):
            try:
                finish(device)
            except Exception as error:
                print(f"tpu: found at exit: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                _C.fail_at_exit()


__all__ = ["initialize", "lowered_ops"]
