"""Which segments are served by a program that is padded, and by which.

Only segments that were recorded without gradients. Two sizes show what grows: the first two are compiled as
they are and the third is padded; the second is already where it is longer by one, as in a loop that grows.
What cannot be proven (`rules.py`) is compiled for its own sizes.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import jax

from tpu_backend.buckets import bucket as fine_bucket
from tpu_backend.lowering.bounds import BoundsCheck
from tpu_backend.lowering.collectives import NAMESPACE
from tpu_backend.padded.dims import NotPaddableError
from tpu_backend.padded.executable import Plan, pieces
from tpu_backend.padded.family import Description, Family, Lengthening, outline, sizes_of
from tpu_backend.runtime.signature import summaries

log = logging.getLogger("tpu_backend.compile")

_KEPT = 6  # segments of a class, to compare with
_MOST_ATTEMPTS = 24  # to find a family among those of a class
_MOST_CLASSES = 512
_SMALLEST = 32
_CHEAP = 2**22  # elements made at _SMALLEST; a program of fewer runs for milliseconds


class Program(NamedTuple):
    """A padded program, loaded."""

    execute: Callable[..., Any]
    handlers: list[Any]
    compiled: Any  # holds what its host callbacks need
    key: str | None  # by which the executable cache has it


class Served(NamedTuple):
    """What serves a segment."""

    program: Program
    plan: Plan
    bounds_checks: tuple[BoundsCheck, ...]


class Build(Protocol):
    """Compiles a padded program, or finds it on disk."""

    def __call__(self, lengthening: Lengthening) -> Program: ...


class _Class:
    """Segments of one outline."""

    def __init__(self) -> None:
        self.examples: deque[Description] = deque(maxlen=_KEPT)
        self.families: list[Family] = []
        self.num_attempts = 0


_lock = threading.RLock()
_classes: OrderedDict[tuple[Any, ...], _Class] = OrderedDict()
_loaded: dict[str, Program] = {}
_programs: dict[tuple[Family, int], Future[tuple[Program, list[tuple[Any, ...]]]]] = {}


def may_be_padded(description: Description) -> bool:
    """Whether the recorder allows it (csrc/record/stream.cpp), and it has no collectives: other ranks would
    have to agree.
    """
    return (
        description["may_be_padded"]
        and not any(description["offset_is_input"])
        and not any(entry.name.startswith(NAMESPACE) for entry, _, _ in summaries(description["tape"]))
    )


def note(description: Description) -> None:
    """A segment is to be compiled: it is an example."""
    with _lock:
        found = _class_of(description)
        if all(example["tape"] != description["tape"] for example in found.examples):
            found.examples.append(description)


def serve(description: Description, build: Build, may_wait: bool) -> Served | None:
    """What serves a segment; None where it is to be compiled for its own sizes. `may_wait`: else the program
    that another thread is compiling is not waited for, since that thread may be waiting for this one.
    """
    with _lock, jax.enable_x64(True):
        found = _family_of(description)
    if found is None:
        return None
    family, size = found
    length = _bucket(family, size)
    if (made := _program(family, length, build, may_wait)) is None:
        return None
    program, outputs = made
    plan = Plan(
        [pieces(dims, length, size) for dims in family.input_dims],
        [pieces(dims, length, size) for dims in outputs],
        family.numbers_of(description, size),
    )
    return Served(program, plan, family.bounds_checks_of(description))


def loaded(key: str, load: Callable[[str], Any]) -> Program | None:
    """The padded program that the executable cache has by this key; loaded once."""
    with _lock:
        if key not in _loaded and (found := load(key)) is not None:
            _loaded[key] = Program(found.execute, found.handlers, found.compiled, key)
        return _loaded.get(key)


def forget() -> None:
    """All of it: the programs are of a runtime that is closed."""
    with _lock:
        _classes.clear()
        _loaded.clear()
        _programs.clear()


def _class_of(description: Description) -> _Class:
    key = outline(description)
    found = _classes.setdefault(key, _Class())
    _classes.move_to_end(key)
    if len(_classes) > _MOST_CLASSES:
        _classes.popitem(last=False)
    return found


def _family_of(description: Description) -> tuple[Family, int] | None:
    """The family that a segment belongs to, and its size there."""
    found = _class_of(description)
    for family in found.families:
        if (size := family.size_of(description)) is not None:
            return family, size
    others = [example for example in found.examples if example["tape"] != description["tape"]]
    pairs = list(itertools.combinations(reversed(others), 2))
    if not found.families and others and _is_longer_by_one(description, others[-1]):
        pairs.append((others[-1], description))
    for pair in pairs:
        if found.num_attempts >= _MOST_ATTEMPTS:
            return None
        found.num_attempts += 1
        try:
            family = Family(*pair)
            if (size := family.size_of(description)) is None:
                continue
            lengthening = family.at(_bucket(family, size))
            jax.eval_shape(lengthening.function, *lengthening.shapes(None))
        except NotPaddableError as why:
            log.debug("not padded: %s", why)
            continue
        except Exception as error:  # a rule that is wrong: nothing is lost but time
            log.warning("not padded: %s: %s", type(error).__name__, error)
            continue
        found.families.append(family)
        return family, size
    return None


def _is_longer_by_one(description: Description, earlier: Description) -> bool:
    """Whether a size is one more than it was, and none is less."""
    grown = {size - before for size, before in zip(sizes_of(description), sizes_of(earlier), strict=True)}
    return min(grown, default=0) >= 0 and 1 in grown


def _bucket(family: Family, size: int) -> int:
    """How long the program is that serves a size: 32, 48, 64, 96, ...; of large rows 4, 6, 8, ..."""
    is_cheap = family.cost * _SMALLEST <= _CHEAP
    return max(_SMALLEST, fine_bucket(size)) if is_cheap else fine_bucket(size)


def _program(
    family: Family, length: int, build: Build, may_wait: bool
) -> tuple[Program, Sequence[tuple[Any, ...]]] | None:
    """The program of a family at a bucket: compiled once, by whoever comes first. None where another thread
    compiles it and must not be waited for.
    """
    with _lock:
        future = _programs.get((family, length))
        is_mine = future is None
        if future is None:
            future = _programs[family, length] = Future()
    if is_mine:
        lengthening = family.at(length)
        try:
            program = build(lengthening)
        except BaseException as error:
            with _lock:
                del _programs[family, length]
            future.set_exception(error)
            raise
        future.set_result((program, lengthening.outputs))
    return future.result() if may_wait or future.done() else None
