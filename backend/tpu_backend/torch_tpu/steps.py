"""Steps that are prepared: captured to be replayed, or rehearsed so that their programs are compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tpu_backend import _C
from tpu_backend.torch_tpu.devices import flush, index_of, init
from tpu_backend.torch_tpu.modes import get_eager_mode
from tpu_backend.torch_tpu.random import get_rng_state, set_rng_state


def capture(
    function: Callable[..., Any] | None = None,
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """Capture a function of tensors, for instance a whole training step. Also a decorator.

    Python runs the function until two calls were recorded alike. Later calls launch the same program from
    C++.

    - New in each call are: tensors and floats among the arguments (also in tuples, lists and dictionaries),
      the contents of every tensor that it reads, its random numbers, and the numbers in an optimizer's
      `param_groups`.
    - Tensors that it returns require no gradient, except inside another captured function.
    - It is recorded again when an argument has another shape, dtype or constant value, when a mode of
      PyTorch changes, or when a module or optimizer that it can reach changes (`training`, parameters,
      buffers, hooks, settings, state). `modules` and `optimizers` name those that cannot be reached from its
      tensors, arguments, closure, globals and `self`.
    - Its other effects in Python are the caller's promise, as with `torch.cuda.graph`.
    - If it cannot be captured (``docs/compile.md``), Python runs it each time, with a warning. The attribute
      `problem` of the result says why the last call was no replay.
    - If none of its tensors and parameters is on the device, it just runs.

    Raises TypeError for a tensor argument elsewhere while others, or a module, are on the device.
    """
    init()
    from tpu_backend.captured.step import capture as captured

    return captured(function, modules=modules, optimizers=optimizers)


def spmd(
    function: Callable[..., Any] | None = None,
    *,
    modules: Sequence[torch.nn.Module] = (),
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> Any:
    """Make a function a region, whose programs do not depend on what else this process holds or has run.

    Python runs it each time. Processes that call it equally often, with the same shapes, slices and static
    numbers, launch the same programs, whatever one of them prints, keeps or clones; the attribute `digests`
    of the result tells those of the last call. Also a decorator.

    - It has the results that are declared: what it returns, what it gives to `keep` of the result, what
      buffers hold that are older than the call, and what is held by modules (parameters, their gradients,
      buffers, other attributes) and by optimizers that it can reach. `modules` and `optimizers` name those
      that cannot be reached from its arguments, closure, globals and `self`.
    - Any other tensor that is made in it has no value after the call: reading one raises RuntimeError.
    - A read by the host inside it (`item()`, `print`) ends a program there. What buffers then hold is
      returned, whether or not somebody needs it.
    - In a mode other than fused, and inside another region, a captured step or a rehearsal, it just runs.
    """
    init()
    from tpu_backend.region import Region

    def region_of(function: Callable[..., Any]) -> Any:
        return Region(function, modules, optimizers)

    return region_of if function is None else region_of(function)


def is_current_stream_capturing() -> bool:
    """Whether a graph is being captured as CUDA does it: never. See `capture`."""
    return False


@contextmanager
def rehearsal(device: Any = None) -> Iterator[None]:
    """Compile what is recorded in here without running it, so that later the same begins at once.

    Threads compile; `is_compiling_ahead` says when they are done. At the end each tensor of the device has
    its earlier value again, and generators continue where they stood. A tensor that Python made in here has
    no value. Changes in Python beside tensors are not undone, and what other threads record on the device
    meanwhile is rehearsed too.

    Raises RuntimeError:

    - inside another rehearsal, and in a mode other than fused
    - for a read of what is computed in here (``item()``, ``print``, an operator that runs on the CPU)
    - for resizing a storage that was there before

    After an error tensors have their earlier values, too.
    """
    if get_eager_mode() != "fused":
        raise RuntimeError(
            f"torch.tpu.rehearsal in mode {get_eager_mode()!r}: it prepares fused mode's programs"
        )
    init()
    index = index_of(device)
    generator = get_rng_state(index)
    _C.begin_rehearsal(index)
    try:
        yield
        flush(index)
    finally:
        _C.end_rehearsal(index)
        set_rng_state(generator, index)
