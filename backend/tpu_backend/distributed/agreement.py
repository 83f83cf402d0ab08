"""Ranks make the same calls in the same order, or are told where they do not, before wrong values come of it.

XLA notices nothing: ranks that launch different collectives get values that are silently wrong.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
from jax._src import distributed

from tpu_backend.distributed import start
from tpu_backend.runtime.user_line import user_line

_PATIENCE_MS = 500  # between two looks at the other ranks

_digests: dict[tuple[str, str, str], str] = {}  # by group, its last call, and a call that came next before
_numbers: Counter[str] = Counter()  # of calls, by group
_last: dict[str, str] = {}  # call, by group


_exchanges: Counter[str] = Counter()  # by group


def exchange(ranks: Sequence[int], numbers: Sequence[int]) -> list[list[int]]:
    """What each of these ranks gives, in their order. All of them call it, equally often.

    Raises RuntimeError if another rank has failed, or does not come within the timeout of the world's group.
    """
    peers = start.peers
    assert peers is not None
    client: Any = distributed.global_state.client
    group = ",".join(map(str, ranks))
    _exchanges[group] += 1
    place = f"tpu/starts/{group}/{_exchanges[group]}"
    client.key_value_set(f"{place}/{peers.rank}", json.dumps(list(numbers)))
    deadline = time.monotonic() + peers.timeout
    given = []
    for rank in ranks:
        while True:
            try:
                given.append(json.loads(client.blocking_key_value_get(f"{place}/{rank}", _PATIENCE_MS)))
                break
            except jax.errors.JaxRuntimeError:
                late = f"rank {rank} did not come within {peers.timeout:.0f} s"
                if (failure := peers.failure()) is not None or time.monotonic() > deadline:
                    peers.has_failed = True
                    raise RuntimeError(f"the first launch of a region: {failure or late}") from None
    return given


def call(ranks: Sequence[int], text: str, seconds: float) -> int:
    """This rank is about to make the next call of a group: `text` says op, dtype and shape. Its number.

    It waits for all ranks of the group where this call has not followed the last one before: a step that
    repeats waits for nobody. Raises RuntimeError as `Peers.agree` does.
    """
    peers = start.peers
    assert peers is not None
    if (failure := peers.failure()) is not None:
        peers.has_failed = True
        raise RuntimeError(failure)
    group = ",".join(map(str, ranks))
    _numbers[group] += 1
    step = group, _last.get(group, ""), text
    _last[group] = text
    peers.last_call = group, _numbers[group]
    digest = _digests.get(step)
    if digest is not None:
        peers.call(group, _numbers[group], digest)
        return _numbers[group]
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    peers.agree(group, _numbers[group], digest, f"{text}, first at {user_line()}", seconds)
    _digests[step] = digest
    return _numbers[group]
