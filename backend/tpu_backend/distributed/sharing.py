"""One rank compiles a program, the others load it: through the key-value store of JAX's service.

Whoever asks first for a key compiles; the others wait. Keys are those of the executable cache.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import jax
from jax._src import distributed

from tpu_backend.distributed import peers

_PATIENCE_MS = 500  # between two looks at the other ranks
_LENGTH = 8  # bytes that say how long the header is
_GIVEN_UP = b"\0"

_ROOM = 2**28  # bytes that the service keeps for this rank

_asked: set[str] = set()  # keys, by this rank
_leases: set[str] = set()  # keys of what this rank is to compile
_published: dict[str, int] = {}  # bytes by key, the oldest first


def is_needed() -> bool:
    """Whether there are other ranks."""
    return peers.world is not None and peers.world.world_size > 1


def compiled_elsewhere(key: str, num_ranks: int | None) -> tuple[dict[str, Any], bytes] | None:
    """Header and payload of a program that another rank has compiled, once it is there. `num_ranks` run it
    together; None: each rank of the world may run it by itself.

    None: this rank is to compile it, and then to `publish` it or to `give_up`; or nobody can share it.
    """
    if peers.world is None or not is_needed():
        return None
    if key in _asked:  # this rank has had it before, and evicted it: the others may be done with it
        return None
    _asked.add(key)
    client: Any = distributed.global_state.client
    deadline = time.monotonic() + peers.world.timeout
    try:
        client.key_value_set(f"tpu/lease/{key}", str(peers.world.rank))
        _leases.add(key)
        return None
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    while peers.world.failure() is None and time.monotonic() < deadline:
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            whole = client.blocking_key_value_get_bytes(f"tpu/program/{key}", _PATIENCE_MS)
            if whole == _GIVEN_UP:
                return None
            cut = _LENGTH + int.from_bytes(whole[:_LENGTH])
            if (
                client.key_value_increment(f"tpu/readers/{key}", 1)
                == (num_ranks or peers.world.world_size) - 1
            ):
                client.key_value_delete(f"tpu/program/{key}")  # all have it
            return json.loads(whole[_LENGTH:cut]), whole[cut:]
    return None


def publish(key: str, header: dict[str, Any], payload: bytes) -> None:
    """Give a program to the ranks that wait for it. Where that cannot be, each compiles its own."""
    if key not in _leases:
        return
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(_LENGTH) + text + payload
    try:
        _put(key, whole)
    except jax.errors.JaxRuntimeError:  # too large for the service, or that has ended
        give_up(key)
        return
    _published[key] = len(whole)
    while len(_published) > 1 and sum(_published.values()) > _ROOM:
        oldest = next(iter(_published))  # whoever has not loaded it compiles it
        del _published[oldest]
        client: Any = distributed.global_state.client
        client.key_value_set_bytes(f"tpu/program/{oldest}", _GIVEN_UP, allow_overwrite=True)


def give_up(key: str) -> None:
    """It cannot be shared, or did not compile: each rank compiles it."""
    if key in _leases:
        with suppress(jax.errors.JaxRuntimeError):  # the service has ended, and the ranks hear of that
            _put(key, _GIVEN_UP)


def _put(key: str, whole: bytes) -> None:
    client: Any = distributed.global_state.client
    client.key_value_set_bytes(f"tpu/program/{key}", whole, allow_overwrite=True)
    _leases.remove(key)  # last: `give_up` needs it where the write has failed
