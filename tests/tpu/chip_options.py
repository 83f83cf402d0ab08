"""The compiler's options of programs with collectives, as the installed compiler takes them.

Run as a process of its own: it loads libtpu. Prints as JSON, by JAX's kind of device, the options of a
program with and of one without collectives, and again where the table has an option that no compiler knows;
and how many devices the first one has.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from tpu_backend.runtime import compiler_options
from tpu_backend.runtime.target import Target

TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:4x4")


def main() -> None:
    found = {}
    for name in TOPOLOGIES:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
        alone = Target("tpu", devices[0])
        together = replace(alone, mesh=Mesh(np.array(devices), ("ranks",)))
        kind = devices[0].device_kind
        without, with_collectives = (compiler_options.options_for({}, each) for each in (alone, together))
        of_chip = compiler_options.FOR_COLLECTIVES.get(kind, {})
        compiler_options.FOR_COLLECTIVES[kind] = of_chip | {"xla_tpu_no_such_option": True}
        compiler_options._accepted.cache_clear()
        found[kind] = [without, with_collectives, compiler_options.options_for({}, together), len(devices)]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
