"""The compiler options of a program, besides the process's own XLA_FLAGS.

Of a CPU they follow from the program: which library's kernels it takes, and whether it has a chain of views
that XLA's emitters cannot cope with. Of a TPU one is for all programs; those with collectives have others, by
the generation of the chip.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tpu_backend.lowering.registry import is_16_bit
from tpu_backend.runtime.dtypes import lowered_dtype
from tpu_backend.runtime.index_chains import longest_chain
from tpu_backend.runtime.signature import summaries
from tpu_backend.runtime.target import Target

# XLA takes the CPU's kernels from two libraries. YNN is faster where large matrices meet. The other
# adds products one after the other, each with one rounding, as PyTorch's CPU kernels do, so that a product of
# matrices is the CPU's to the bit (but for tiny ones on an AMD EPYC, where MKL rounds twice); it has the
# faster convolutions. YNN's sums leave out the rounding to 16 bit in front of a sum: without them, many
# operators in one program round as they do one by one.
_KERNELS_OF_YNN = "xla_cpu_experimental_ynn_fusion_type"
_SUMS = "LIBRARY_FUSION_TYPE_REDUCE"
_SUMS_AND_PRODUCTS = f"{_SUMS},LIBRARY_FUSION_TYPE_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
_LARGE_ARRAY = 2**14  # elements; in a program of smaller ones the products are no matter of time


def options_for(
    description: dict[str, Any], target: Target, largest: int | None = None
) -> dict[str, Any] | None:
    """What this program is compiled with besides the process's own XLA_FLAGS; `largest`: elements of its
    largest array, where that is not the segment's.
    """
    if target.platform == "tpu":
        return dict(_accepted(target.device, target.num_ranks or 1))
    if target.platform != "cpu":
        return None
    values = {value for entry, _, _ in summaries(description["tape"]) for value in entry.values}
    if any(is_16_bit(lowered_dtype(dtype)) for dtype in {dtype for dtype, _ in values}):
        return {_KERNELS_OF_YNN: ""}
    if largest is None:
        sizes = [math.prod(dims) for _, dims in description["input_layouts"]]
        largest = max([*sizes, *(size for _, size in values)], default=0)
    return {_KERNELS_OF_YNN: _SUMS_AND_PRODUCTS if largest > _LARGE_ARRAY else _SUMS}


# XLA:CPU's emitters of fusions take exponential time for some chains of views. Without them it compiles those
# in no time, and an ordinary step a quarter slower, which then takes 4 % longer.
_WITHOUT_EMITTERS = {"xla_cpu_use_fusion_emitters": False}
_WITHOUT_FUSIONS = {"xla_disable_hlo_passes": "fusion"}
_LONG_CHAIN = 6  # merging reshapes; ordinary models chain one or two


def with_chains_compiled(
    options: dict[str, Any] | None, lowered: jax.stages.Lowered, target: Target
) -> dict[str, Any] | None:
    """The options with the emitters switched off where a program has a long chain. Both keys on disk hold
    this choice: it is a function of the program's text, and that one of the tape.
    """
    if target.platform == "cpu" and longest_chain(lowered) >= _LONG_CHAIN:
        return (options or {}) | (_WITHOUT_EMITTERS if _has_other_emitters() else _WITHOUT_FUSIONS)
    return options


@cache
def _has_other_emitters() -> bool:
    """Whether this XLA can do without them: that of JAX 0.12 cannot, and says so."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=dict(_WITHOUT_EMITTERS))
    except jax.errors.JaxRuntimeError:
        return False
    return True


# Matmuls carry gathers along. libtpu does so by itself on a v5e. On a v5p it makes gathers all-reduces unless
# these and xla_tpu_prefer_async_allgather_to_allreduce are set.
_FUSION = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": True,
}
_V6E = ("TPU v6 lite", "TPU v6e")
FOR_COLLECTIVES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_V6E, _FUSION),
    **dict.fromkeys(("TPU v5", "TPU v5p"), _FUSION | {"xla_tpu_prefer_async_allgather_to_allreduce": True}),
}
"""By JAX's kind of device, for programs with collectives (docs/plan.md has what they change)."""
# Of the 128 MiB on the chip an operation may use more than libtpu's own limit: products of large steps read
# their operands from memory less often. A small step on one chip became slower, and on four chips compiling
# took more than four times as long.
_ON_CHIP = {"xla_tpu_scoped_vmem_limit_kib": 98_304}
FOR_SEVERAL_HOSTS: dict[str, dict[str, Any]] = dict.fromkeys(_V6E, _ON_CHIP)
"""The same, for programs on more devices than a host has."""
_HOST = 8  # chips, of a v6e
FOR_ALL: dict[str, Any] = {
    # libtpu places buffers with large gaps where less than half of the memory is needed. False: closely.
    "xla_tpu_buffer_assignment_enable_fast_merge_fallback": False,
}


def wanted_for(kind: str, num_devices: int) -> dict[str, Any]:
    """The options for programs on so many devices of a kind, as JAX calls it, whatever the installed compiler
    knows.
    """
    return (
        FOR_ALL
        | (FOR_COLLECTIVES.get(kind, {}) if num_devices > 1 else {})
        | (FOR_SEVERAL_HOSTS.get(kind, {}) if num_devices > _HOST else {})
    )


@cache
def _accepted(device: Any, num_devices: int) -> dict[str, Any]:
    """Those that the installed compiler knows, but for what LIBTPU_INIT_ARGS sets itself."""
    arguments = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    given = {argument.lstrip("-").partition("=")[0].removeprefix("no") for argument in arguments}
    options = wanted_for(device.device_kind, num_devices)
    wanted = {name: value for name, value in options.items() if name not in given}

    def are_known(options: dict[str, Any]) -> bool:
        try:
            nothing.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            if "No such compile option" not in str(error):
                raise
            return False
        return True

    if not wanted:
        return wanted
    nothing = jax.jit(lambda: 0, out_shardings=SingleDeviceSharding(device)).lower()
    if are_known(wanted):
        return wanted
    return {name: value for name, value in wanted.items() if are_known({name: value})}
