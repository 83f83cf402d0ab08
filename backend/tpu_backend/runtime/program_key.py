"""What a compiled program is found by in another process: all that it was made of, and nothing of this one.

A segment is described by its tape. Where each of its entries is lowered by this package, the tape decides the
program, and nothing need be traced to look it up. An entry that somebody's own function lowers (`jax_op`, a
compiled graph) has only a number and a name; there the traced program's text is the key.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from jaxlib import xla_client

from tpu_backend import _C
from tpu_backend.lowering import registry
from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.lowering.collectives import AXIS
from tpu_backend.runtime.signature import Summary, summaries
from tpu_backend.runtime.target import Target, target_of

_PACKAGE = Path(__file__).resolve().parent.parent
_OWN = "tpu_backend.lowering."
_SETTLED_BY_VERSION = (_OWN, "jax.")  # modules whose functions lower alike in the same environment

# Where a compiler, or what it links, is a package of its own.
_COMPILERS = {
    "tpu": ("libtpu",),
    "cuda": (
        *(f"jax-cuda{major}-{part}" for major in (12, 13) for part in ("pjrt", "plugin")),
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
        "nvidia-cublas-cu12",
        "nvidia-cublas",
    ),
    "cpu": (),
}
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Of a segment's description: what shapes no program, and what the key has in other words.
NO_PART_OF_A_PROGRAM = (
    "circumstances",
    "in_parts",
    "was_in_parts",
    "was_evicted",
    "may_time_out",
    "origin",
    "checked",
    "agreement",
)
_SAID_OTHERWISE = ("tape", "offsets", "may_be_padded", "device", *NO_PART_OF_A_PROGRAM)
# JAX's settings that say where something is written, and change no program.
_HARMLESS_SETTINGS = ("jax_compilation_cache", "jax_persistent_cache", "jax_dump_ir", "jax_log")


def environment(target: Target) -> dict[str, Any]:
    """All that decides, beside the program itself, what XLA makes of it and where that runs, as JSON."""
    return _fixed_environment(target) | {"flags": flags(), "jax_settings": _jax_settings()}


@cache
def flags() -> dict[str, list[str]]:
    """What the compilers were told by environment variables. They read them once, when they start: to be
    called then. What a script sets later changes no program of its own.

    In their order: of a flag that is given twice, the last one counts.
    """
    return {name: _flags_in(os.environ.get(name, "")) for name in _FLAGS}


def _flags_in(text: str) -> list[str]:
    words = text.split()
    if not words or words[0].startswith("-"):
        return words
    with suppress(OSError):  # else XLA takes it for no flags
        return Path(words[0]).read_text().split()  # a file that holds them
    return words


@cache
def _fixed_environment(target: Target) -> dict[str, Any]:
    device = target.device
    versions = {name: version(name) for name in ("torch", "jax", "jaxlib")}
    for name in _COMPILERS[target.platform]:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    order = target.ranks if target.groups else ()  # of one group, each collective says its ranks
    return {
        "versions": versions,
        "sources": _source_digest(),
        "platform": [target.platform, device.client.platform_version],
        "device": device.device_kind,
        # On the CPU it says which process this is, and no more.
        "topology": "" if target.platform == "cpu" else _topology(device),
        "mesh": [] if target.mesh is None else [list(target.mesh.shape.items()), order],
        "host": _host_cpu() if target.platform == "cpu" else {},
    }


def _source_digest() -> str:
    """Of this package: its lowerings, and what stands around them."""
    digest = hashlib.sha256()
    built_for = Path(_C.__file__).with_name("_build_info.json")
    for file in [*sorted(_PACKAGE.rglob("*.py")), built_for]:
        digest.update(f"{file.relative_to(_PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()


def _topology(device: Any) -> str:
    """How the chips of a slice are arranged, as XLA's own digest of it; not every platform has one. Of the
    whole slice: a rank's own place in it is no part of a program.
    """
    try:
        return f"{xla_client.get_topology_for_devices(device.client.devices()).fingerprint():016x}"
    except jax.errors.JaxRuntimeError:
        return ""


def _host_cpu() -> dict[str, Any]:
    """XLA on the CPU compiles for the instructions of this one, and for as many threads as may run."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = dict(line.replace("\t", "").split(":", 1) for line in reversed(lines) if ":" in line)
    features = found.get("flags", found.get("Features", "")).split()
    return {
        "model": found.get("model name", "").strip(),
        "features": hashlib.sha256(" ".join(sorted(features)).encode()).hexdigest(),
        "threads": len(os.sched_getaffinity(0)),
    }


_last_settings: tuple[dict[str, Any], str] = ({}, "")  # asked for with each program


def _jax_settings() -> str:
    """A digest of JAX's, as they are on this thread."""
    global _last_settings
    with jax.enable_x64(True):  # as programs are lowered
        values = jax.config.values
    known, digest = _last_settings
    if values != known:
        said = {name: str(value) for name, value in values.items() if not name.startswith(_HARMLESS_SETTINGS)}
        digest = _digest(said)
        _last_settings = values, digest
    return digest


def key_of_tape(description: dict[str, Any], options: dict[str, Any] | None, target: Target) -> str | None:
    """The key of a segment by what was recorded, compiled with these options; None where its text must decide
    (`key_of_text`).
    """
    words: list[Any] = []
    for entry, precision, links in summaries(description["tape"]):
        if not settled_by_version(entry.name):
            return None
        words.append([_identity(entry, target), precision, list(links)])
    offsets: Sequence[int | None] = [
        None if is_input else offset
        for offset, is_input in zip(description["offsets"], description["offset_is_input"], strict=True)
    ]
    rest = {name: value for name, value in description.items() if name not in _SAID_OTHERWISE}
    return _key({"entries": words, "offsets": offsets, "options": options} | rest, target)


def _identity(entry: Summary, target: Target) -> str:
    """What an operation is. In a mesh of several dimensions a group of ranks is an axis, so that the program,
    which all ranks of the mesh run, has one key.
    """
    if not target.groups or not entry.is_collective:
        return entry.digest
    return hashlib.sha256(repr(collective_identity(entry, target)).encode()).hexdigest()


def collective_identity(entry: Summary, target: Target) -> tuple[Any, ...]:
    """A collective in words that print alike on all ranks of the target's mesh."""
    decoded = entry.signature
    axes = dict(target.groups).get(tuple(decoded.ranks or ()), (AXIS,))
    given = [argument for argument in decoded.arguments if argument.name != "ranks"]
    return decoded.overload, given, decoded.outputs, axes


def key_of_text(
    lowered: jax.stages.Lowered,
    bounds_checks: Sequence[BoundsCheck],
    options: dict[str, Any] | None,
    target: Target,
) -> str:
    """The key of a traced program: its StableHLO, which says what is donated too, its bounds checks, and the
    options that it is compiled with.
    """
    said = [_described(bounds_check) for bounds_check in bounds_checks]
    return _key({"text": lowered.as_text(), "bounds_checks": said, "options": options}, target)


def key_of_plan(key: str, target: Target) -> str:
    """The key of how a padded program serves the segment that has this key."""
    return _key({"plan": key}, target)


def key_of_forms() -> str:
    """The key of what was found out about forms of ops, see `known_forms.py`. XLA's flags and JAX's settings
    say how programs are compiled, and no lowering asks for them.
    """
    return _digest({"environment": _fixed_environment(target_of(0)), "program": {"forms": True}})


def settled_by_version(name: str) -> bool:
    """Whether an op is lowered by a function that is the same wherever the environment is."""
    lowering = registry.TABLE.get(name)  # the device's own entries are in no table
    module = _OWN if lowering is None else getattr(lowering.function, "__module__", None)
    return isinstance(module, str) and module.startswith(_SETTLED_BY_VERSION)


def _described(bounds_check: BoundsCheck) -> dict[str, Any]:
    return asdict(bounds_check) | {"error": bounds_check.error.__name__}


_last_environment: tuple[dict[str, Any], str] = ({}, "")  # and its digest, asked for with each program


def _key(program: dict[str, Any], target: Target) -> str:
    global _last_environment
    now = environment(target)
    known, digest = _last_environment
    if now != known:
        digest = _digest(now)
        _last_environment = now, digest
    return _digest({"environment": digest, "program": program})


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
