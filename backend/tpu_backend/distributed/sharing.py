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

_asked: set[str] = set()  # keys, by this rank


def is_needed() -> bool:
    """Whether there are other ranks."""
    return peers.world is not None and peers.world.world_size > 1


def compiled_elsewhere(key: str) -> tuple[dict[str, Any], bytes] | None:
    """Header and payload of a program that another rank has compiled, once it is there.

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
        return None
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
    while peers.world.failure() is None and time.monotonic() < deadline:
        with suppress(jax.errors.JaxRuntimeError):  # not there yet
            whole = client.blocking_key_value_get_bytes(f"tpu/program/{key}", _PATIENCE_MS)
            if len(whole) == 1:
                return None
            cut = _LENGTH + int.from_bytes(whole[:_LENGTH])
            if client.key_value_increment(f"tpu/readers/{key}", 1) == peers.world.world_size - 1:
                client.key_value_delete(f"tpu/program/{key}")  # all have it
            return json.loads(whole[_LENGTH:cut]), whole[cut:]
    return None


def publish(key: str, header: dict[str, Any], payload: bytes) -> None:
    """Give a program to the ranks that wait for it."""
    text = json.dumps(header).encode()
    _put(key, len(text).to_bytes(_LENGTH) + text + payload)


def give_up(key: str) -> None:
    """It cannot be shared, or did not compile: each rank compiles it."""
    _put(key, b"\0")


def _put(key: str, whole: bytes) -> None:
    if is_needed():
        client: Any = distributed.global_state.client
        with suppress(jax.errors.JaxRuntimeError):  # this rank had no lease
            client.key_value_set_bytes(f"tpu/program/{key}", whole)
