"""Starts JAX's runtime in this process as one rank of many."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from tpu_backend import _C
from tpu_backend.chips import is_tpu_wanted
from tpu_backend.distributed import launched, libtpu_environment, peers
from tpu_backend.distributed.libtpu_environment import Place

_SERVICE = Path(__file__).with_name("service.py")
# Seconds between two looks at who has come, at first and after a while: many ranks keep the store busy.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2
_SAID_AFTER = 10.0  # seconds of waiting for the others

first_use = ""
"""The user's line that used the device first, once it has started."""


def start(store: Any, rank: int, world_size: int, timeout: float) -> None:
    """Make this process a rank of a world, for `init_process_group`; `store` is where the ranks rendezvous.
    Tensors of a process that has used the device alone move over.

    Raises RuntimeError if they cannot, if this process is in a world of another size already, or if a rank
    does not come within `timeout` seconds.
    """
    if (world := peers.world) is not None:
        if (world.rank, world.world_size) == (rank, world_size):
            world.timeout = timeout  # a first use of the device had none to take
            return
        raise RuntimeError(
            f"this process is rank {world.rank} of {world.world_size} since it joined them, "
            f"and cannot become rank {rank} of {world_size}: start a new one"
        )
    if world_size > 1 and _C.is_initialized():
        _check_may_move()
    _join(_common(store), rank, world_size, timeout, "init_process_group")
    _C.ensure_initialized()


def _check_may_move() -> None:
    from tpu_backend.runtime import moving  # the device has started, and with it JAX

    if (reason := moving.why_not()) is not None:
        raise RuntimeError(
            f"init_process_group: this process has used the tpu device before, alone, at {first_use}, and "
            f"its tensors cannot move over ({reason}): call init_process_group before that line"
        )


def start_if_launched(line: str) -> None:
    """At the first use of the device: if a launcher has started this process as a rank, wait for the others.
    XLA's runtime is one of many processes from its start on, or never.

    Raises RuntimeError if a rank does not come within the time that `init_process_group` would give it.
    """
    global first_use
    first_use = line
    if peers.world is not None or not launched.is_one_of_many():
        return
    # Not where nobody asked for many processes: it takes its time.
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.rendezvous import rendezvous

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = default_pg_timeout
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    _stores.append(store)  # rank 0's is the server
    what = f"the first use of the device, at {line}"
    _join(_common(store), rank, world_size, timeout.total_seconds(), what)


_stores: list[Any] = []


def _base(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _common(store: Any) -> Any:
    """The store that a first use of the device and `init_process_group` have in common, if a launcher named
    it: one rank may begin with this, another with that.
    """
    base = _base(store)
    is_its = isinstance(base, TCPStore) and launched.is_its(base.host, base.port)
    return PrefixStore("tpu_device", base if is_its else store)


def _join(store: Any, rank: int, world_size: int, timeout: float, what: str) -> None:
    if rank == 0:
        store.set("service", json.dumps(_start_service(store, world_size)))
    slice_ = None
    place = Place(_address_of_this_host(store), _free_port(), int(os.environ.get("LOCAL_RANK", rank)), 0)
    if is_tpu_wanted() and not libtpu_environment.is_arranged_by_user() and world_size > 1:
        facts = libtpu_environment.facts()
        slice_ = libtpu_environment.slice_of(facts, world_size)
        place = replace(place, worker=int(facts.get("WORKER_ID", 0)))
    store.set(f"here/{rank}", json.dumps(asdict(place)))
    deadline = time.monotonic() + timeout
    _wait_for(store, ["service"], [0], deadline, timeout, what)
    address = json.loads(store.get("service"))
    if address["name"] == socket.gethostname():
        address["host"] = "127.0.0.1"
    # First of all: so the service knows when the last rank has gone, even if JAX never starts.
    joining = peers.Peers(address["host"], address["peers"], rank, world_size, timeout)
    ranks = list(range(world_size))
    _wait_for(store, [f"here/{each}" for each in ranks], ranks, deadline, timeout, what)
    if slice_ is not None:
        places = [Place(**json.loads(store.get(f"here/{each}"))) for each in ranks]
        os.environ.update(libtpu_environment.environment_of(rank, slice_, places))

    def connect() -> None:
        _connect(address, rank, world_size, timeout)

    if not _C.is_initialized():
        connect()
    elif world_size > 1:
        from tpu_backend.runtime import moving

        moving.move_over(connect)
    if world_size > 1:
        _C.mark_as_one_of_many()
    peers.world = joining


def _wait_for(
    store: Any, keys: list[str], ranks: list[int], deadline: float, timeout: float, what: str
) -> None:
    """Return when the store has these keys, one a rank. Says who is waited for; raises RuntimeError at the
    deadline.
    """
    say_at, pause = time.monotonic() + _SAID_AFTER, _FIRST_PAUSE
    while not store.check(keys):  # `store.wait` lets no Ctrl-C in, and PyTorch prints each of its timeouts
        if (now := time.monotonic()) > min(say_at, deadline):
            missing = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            named = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            if missing and now > deadline:
                raise RuntimeError(f"{what}: {named} did not come within {timeout:.0f} s")
            if missing:
                print(f"tpu: {what}: waiting for {named}", file=sys.stderr, flush=True)
            say_at = deadline
        time.sleep(pause)
        pause = min(1.1 * pause, _LONGEST_PAUSE)


def _address_of_this_host(store: Any) -> str:
    """Where the other ranks find this process: as they found the store, if it is here too."""
    base = _base(store)
    if not hasattr(base, "host"):  # a file
        return socket.gethostname()
    found = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, there = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(there)  # sends nothing
        here = probe.getsockname()[0]
    return str(base.host if here == there[0] else here)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _start_service(store: Any, world_size: int) -> dict[str, Any]:
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
    return {"host": _address_of_this_host(store), "name": socket.gethostname(), **json.loads(line)}


# The service needs jaxlib alone. Without site no package is loaded by itself: torch takes seconds.
_WITHOUT_SITE = (
    "import runpy, sys; cut = sys.argv.index('--'); "
    "sys.path[:] = sys.argv[1:cut]; sys.argv[:] = sys.argv[cut+1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)


def _connect(address: dict[str, Any], rank: int, world_size: int, timeout: float) -> None:
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
            f"not all of {world_size} ranks came within {timeout:.0f} s ({str(error).splitlines()[0]})"
        ) from error
    state = distributed.global_state
    state.client, state.process_id, state.num_processes = client, rank, world_size
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _C.silence_gloo()
