"""The TPU chips that programs are compiled for, described by libtpu; no chip has to be there."""

from __future__ import annotations

import importlib.util
from functools import cache

from jax.experimental import topologies

from tpu_backend.runtime.target import Target

# The smallest topology of each chip that libtpu describes.
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2"}

# What a process that loads libtpu on a machine without TPU needs to have in its environment: no question to
# the cloud's metadata server, no complaint about its answer, no lock against a second process, and JAX's own
# arrays on the CPU.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_PLATFORM": "cpu",
    "OMP_NUM_THREADS": "1",
}


def compiler_is_installed() -> bool:
    return importlib.util.find_spec("libtpu") is not None


@cache
def target(chip: str) -> Target:
    """One chip of this kind, to compile for."""
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Target("tpu", topology.devices[0])
