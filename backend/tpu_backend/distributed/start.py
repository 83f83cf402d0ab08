"""Starts JAX's runtime in this process as one rank of many."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tpu_backend import _C
from tpu_backend.distributed.peers import Peers

_SERVICE = Path(__file__).with_name("service.py")

peers: Peers | None = None
"""Of this process, once it is one of many."""


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Join the world of `world_size` ranks; `store` is the one that they rendezvous in.

    Raises RuntimeError if this process has used the device alone before, if it is in a world of another size
    already, or if a rank does not come within `timeout` seconds.
    """
    global peers
    if peers is not None:
        if (peers.rank, peers.world_size) == (rank, world_size):
            return
        raise RuntimeError(
            f"this process is rank {peers.rank} of {peers.world_size} since its first init_process_group, "
            f"and cannot become rank {rank} of {world_size}: start a new one"
        )
    if _C.is_initialized():
        raise RuntimeError(
            "init_process_group: this process has used the tpu device before, alone; call init_process_group "
            "before the first tensor on it"
        )
    if rank == 0:
        store.set("tpu/service", json.dumps(_start_service(world_size)))
    address = json.loads(store.get("tpu/service"))
    # First of all: so the service knows when the last rank has gone, even if JAX never starts.
    joining = Peers(address["host"], address["peers"], rank, world_size, timeout)
    _join(address, rank, world_size, timeout)
    peers = joining
    _C.ensure_initialized()
    atexit.register(_end)  # runs before what the device does at exit


def _end() -> None:
    from tpu_backend.distributed import waiting

    waiting.end()


def _start_service(world_size: int) -> dict[str, Any]:
    """Start the process that hosts what must outlive any rank; its address."""
    # A session of its own: what is sent to this rank's group is not for it.
    command = [sys.executable, "-S", "-c", _WITHOUT_SITE, *sys.path, "--", str(_SERVICE), str(world_size)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    process.stdout.close()
    if not line:
        raise RuntimeError(
            "init_process_group: the process that hosts JAX's coordination service ended at once; try "
            f"{sys.executable} {_SERVICE} {world_size}"
        )
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return {"host": host, **json.loads(line)}


# The service needs jaxlib alone. Without site no package is loaded by itself: torch takes seconds.
_WITHOUT_SITE = (
    "import runpy, sys; cut = sys.argv.index('--'); "
    "sys.path[:] = sys.argv[1:cut]; sys.argv[:] = sys.argv[cut+1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def _join(address: dict[str, Any], rank: int, world_size: int, timeout: float) -> None:
    import jax
    from jax._src import distributed
    from jaxlib import _jax

    never = 10**7  # seconds: nothing here aborts this process, and no exit waits for other ranks
    client = _jax.get_distributed_runtime_client(
        f"{address['host']}:{address['jax']}",
        rank,
        init_timeout=max(int(timeout), 1),
        shutdown_timeout=1,
        heartbeat_timeout=never,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    try:
        client.connect()
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"init_process_group: not all of {world_size} ranks came within {timeout:.0f} s "
            f"({str(error).splitlines()[0]})"
        ) from error
    state = distributed.global_state
    state.client, state.process_id, state.num_processes = client, rank, world_size
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
