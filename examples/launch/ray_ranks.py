"""Ranks on the hosts of a Ray cluster, one actor a device.

python ray_ranks.py NUM_RANKS RECIPE [key=value ...]: 8 llama parallel.shard=-1 run_dir=/shared/runs/llama
"""

import os
import socket
import subprocess
import sys
from collections import Counter

import ray

RESTARTS = 3
MISTAKE, INTERRUPTED, STOPPED = 2, 130, 143
"""Exit codes after which ranks are not started again."""
CHIPS = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
"""Ray sets these for each actor; a rank is told its chip by the others."""


@ray.remote(num_cpus=1, resources={"TPU": 1})
class Rank:
    def place(self) -> tuple[str, int]:
        """This host's address, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, place: dict[str, str], arguments: list[str]) -> int:
        """The exit code of this rank."""
        environment = {name: value for name, value in os.environ.items() if name not in CHIPS}
        command = [sys.executable, "-m", "tputrain", "run", *arguments]
        return subprocess.run(command, env=environment | place).returncode


def run_ranks(number: int, arguments: list[str]) -> int:
    """Start all ranks, and return the largest exit code."""
    ranks = [Rank.remote() for _ in range(number)]
    places = ray.get([rank.place.remote() for rank in ranks])
    address, port = places[0]
    on_host: Counter[str] = Counter()
    running = []
    for index, (rank, (host, _)) in enumerate(zip(ranks, places, strict=True)):
        place = {"RANK": index, "WORLD_SIZE": number, "LOCAL_RANK": on_host[host]}
        place |= {"MASTER_ADDR": address, "MASTER_PORT": port}
        running.append(rank.run.remote({name: str(value) for name, value in place.items()}, arguments))
        on_host[host] += 1
    codes = ray.get(running)
    for rank in ranks:
        ray.kill(rank)
    return max(code if code >= 0 else 128 - code for code in codes)


def main() -> int:
    number, *arguments = sys.argv[1:]
    ray.init()
    for _ in range(RESTARTS + 1):
        code = run_ranks(int(number), arguments)
        if code in (0, MISTAKE, INTERRUPTED, STOPPED):
            break
    return code


if __name__ == "__main__":
    sys.exit(main())
