"""Runs a script in several processes, as torchrun does: ranks of one world on this machine's CPU."""

from __future__ import annotations

import functools
import random
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

from tests.backend.distributed.preloaded import PreloadedProcess, start_server
from tests.backend.fresh_process import environment_of_tests
from tests.backend.quick_xla import QUICK_XLA_FLAGS

READ_AT_IMPORT = ("TPU_", "JAX_", "XLA_", "TORCH_", "PYTHON", "OMP_")

# Each rank is what it claims to be: many processes, one XLA device each, and the backend of the device.
PROLOGUE = """
    import os, sys, time
    import torch
    import torch.distributed as dist
    from datetime import timedelta

    timeout, of_group = timedelta(seconds=float(os.environ.get("GROUP_TIMEOUT", "60"))), {}
    if timeout.seconds < 60:  # of collectives alone: on a busy machine ranks start many seconds apart
        number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, number == 0)
        store.set_timeout(timeout)
        of_group = {"store": store, "rank": number, "world_size": size}
    dist.init_process_group(os.environ.get("GROUP_BACKEND") or None, timeout=timeout, **of_group)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert world == int(os.environ["WORLD_SIZE"])
    assert dist.group.WORLD._get_backend(torch.device("tpu")).name() == "tpu"
    import jax
    assert jax.process_count() == jax.device_count() == world and jax.local_device_count() == 1
"""


class Rank:
    """What became of a process."""

    def __init__(self, process: subprocess.Popen[str] | PreloadedProcess):
        self.process = process
        self.stdout = self.stderr = ""
        self.seconds = float("nan")

    @property
    def code(self) -> int | None:
        return self.process.returncode

    @property
    def last_line(self) -> str:
        """Of stderr, but for what the triton of CUDA builds says at its end of what it leaked."""
        return self.stderr.partition("nanobind: leaked")[0].strip().splitlines()[-1]


def free_port() -> int:
    """One that nobody listens at, below those that the system gives to connections: such a one may be taken
    before the ranks have started.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port


def environment_of_ranks() -> dict[str, str]:
    """The environment variables of all ranks, but for those of a launcher."""
    return environment_of_tests() | {"XLA_FLAGS": QUICK_XLA_FLAGS}


@functools.cache
def _server(number: int) -> socket.socket:
    return start_server(environment_of_ranks())


def run_ranks(
    script: str,
    world_size: int,
    *,
    timeout: float = 120,
    prologue: str = PROLOGUE,
    meanwhile: Callable[[list[Rank]], None] | None = None,
    **environment: str,
) -> list[Rank]:
    """Run `prologue` and `script` as each rank of a world, with these environment variables added.

    Ranks with the usual prologue and no variables of PyTorch, JAX and the device begin with both imported.
    `meanwhile` is called when all have started. Kills what has not ended after `timeout` seconds.
    """
    shared = {
        **environment_of_ranks(),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        **environment,
    }
    source = textwrap.dedent(prologue) + textwrap.dedent(script)
    is_preloaded = prologue == PROLOGUE and not any(name.startswith(READ_AT_IMPORT) for name in environment)
    ranks = []
    for rank in range(world_size):
        variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process: subprocess.Popen[str] | PreloadedProcess
        if is_preloaded:
            process = PreloadedProcess(_server(rank % 2), source, variables)
        else:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", source],
                env=variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        ranks.append(Rank(process))
    if meanwhile is not None:
        meanwhile(ranks)
    begin = time.monotonic()
    for each in ranks:
        try:
            left = max(timeout - (time.monotonic() - begin), 0.1)
            each.stdout, each.stderr = each.process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.stdout, each.stderr = each.process.communicate()
            each.stderr += f"\nkilled after {timeout} s"
        each.seconds = time.monotonic() - begin
    return ranks


def assert_all_ended_well(ranks: list[Rank]) -> None:
    for number, each in enumerate(ranks):
        assert each.code == 0, f"rank {number} ended with {each.code}:\n{each.stderr[-4000:]}"
