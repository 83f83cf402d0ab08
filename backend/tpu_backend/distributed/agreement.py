"""Ranks make the same calls in the same order, or are told where they do not, before wrong values come of it.

XLA notices nothing: ranks that launch different collectives get values that are silently wrong.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tpu_backend.distributed import peers
from tpu_backend.distributed.absent import AbsentPeers
from tpu_backend.runtime.user_line import user_line
from tpu_backend.untraced import untraced

_digests: dict[tuple[str, str, str], str] = {}  # by group, its last call, and a call that came next before
_numbers: Counter[str] = Counter()  # of calls, by group
_last: dict[str, str] = {}  # call, by group
_why_not: str | None = None  # a region's collectives are not to be launched
_COMPARE = "a region whose operations or shapes are new to it"


@untraced
def call(group: str, text: str, seconds: float) -> int:
    """This rank is about to make the next call of a group, "0,1,2": `text` says op, dtype and shape. Its
    number.

    It waits for all ranks of the group where this call has not followed the last one before: a step that
    repeats waits for nobody. Raises RuntimeError as `Peers.agree` does.
    """
    world = _begin(group)
    step = group, _last.get(group, ""), text
    _last[group] = text
    digest = _digests.get(step)
    if digest is not None:
        world.call(group, _numbers[group], digest)
        return _numbers[group]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    world.agree(group, _numbers[group], digest, f"{text}, first at {user_line()}", seconds)
    _digests[step] = digest
    return _numbers[group]


@untraced
def refuse(group: str) -> None:
    """Raise RuntimeError, as `call` does, where a group makes no calls any more."""
    assert peers.world is not None
    peers.world.raise_failure(group)


@untraced
def find_sender(groups: list[str], seconds: float) -> int:
    """Which of these groups, this rank and another, is the first in which the other calls `send` next: its
    index.

    Raises RuntimeError if no rank has sent after `seconds`, or as `Peers.raise_failure` does.
    """
    world = peers.world
    assert world is not None
    return world.find_sender([(group, _numbers[group] + 1) for group in groups], seconds)


def gather(ranks: Sequence[int], text: str, told: str) -> list[str]:
    """What each of these ranks has `told`, in this order. They compare what they are about to launch in a
    region: waits for them, and raises as `call` does.
    """
    world, group = _begin_region(ranks)
    digest = hashlib.sha256(_COMPARE.encode()).hexdigest()[:16]
    return world.gather(group, _numbers[group], digest, f"{_COMPARE}: {text}", told, world.timeout)


def launch(ranks: Sequence[int], digest: str, text: str, waits: bool) -> None:
    """These ranks are about to launch programs of a region together. `waits` until all are, and raises as
    `call` does; else they are compared in the background.
    """
    world, group = _begin_region(ranks)
    if waits:
        world.agree(group, _numbers[group], digest, text, world.timeout)
    else:
        world.call(group, _numbers[group], digest)


@contextmanager
def launching_nothing(why: str) -> Iterator[None]:
    """In here what a region has recorded with collectives is not launched: that raises RuntimeError, which
    says why, and meets no other rank.
    """
    global _why_not
    _why_not = why
    try:
        yield
    finally:
        _why_not = None


def _begin_region(ranks: Sequence[int]) -> tuple[peers.Peers | AbsentPeers, str]:
    """Regions and eager collectives of the same ranks share one count."""
    if _why_not is not None:
        raise RuntimeError(_why_not)
    group = ",".join(map(str, ranks))
    return _begin(group), group


def _begin(group: str) -> peers.Peers | AbsentPeers:
    """Count the next call of a group, unless it is refused; the other ranks."""
    refuse(group)
    world = peers.world
    assert world is not None
    _numbers[group] += 1
    world.last_call = group, _numbers[group]
    return world
