"""Which process of a cluster's this one is, as SLURM and GKE say it by environment variables.

torchrun, and others that say RANK and WORLD_SIZE, such as Ray's trainer, need nothing of this.
"""

import os
import re
from typing import NamedTuple

from tputrain.config_checks import expect

_PORT = 29500
_SLURM = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
_HOSTNAMES, _WORKER = "TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"


class Hosts(NamedTuple):
    """The hosts on each of which `tputrain run` starts the local ranks."""

    size: int = 1
    number: int = 0
    """Of this one."""
    address: str = "localhost"
    """Of the first one, where ranks meet."""
    port: int = 0
    """There; 0: any."""


def hosts() -> Hosts:
    """As GKE tells the pods of a TPU slice, which a JobSet starts; else this host alone."""
    names = [name for name in os.environ.get(_HOSTNAMES, "").split(",") if name]
    if len(names) < 2:
        return Hosts()
    index = os.environ.get(_WORKER, "")
    expect(
        index.isdigit() and int(index) < len(names), _WORKER, index, f"0 to {len(names) - 1} ({_HOSTNAMES})"
    )
    return Hosts(len(names), int(index), names[0], int(os.environ.get("MASTER_PORT", _PORT)))


def join_slurm_step() -> None:
    """Where `srun` started this process as one of several tasks: be the rank of that number.

    Ranks are told as torchrun would tell them. To be called before `import torch`.
    """
    said = [os.environ.get(name) for name in _SLURM]
    if "RANK" in os.environ or None in said:
        return
    job, _, nodes, size, rank, local_rank = map(str, said)
    if int(size) < 2:
        return
    os.environ |= {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": first_node(nodes),
        "MASTER_PORT": str(2**16 - 2**12 + int(job) % 2**12),  # another one for each of a node's jobs
    }


def first_node(nodes: str) -> str:
    """Of SLURM's list of them: `a[07-09,12],b` begins with a07."""
    name, numbers, rest = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,]*)", nodes).groups()  # type: ignore[union-attr]
    return name + re.split("[-,]", numbers)[0] + rest if numbers else name + rest
