"""XLA's options for tests that look at values and at what ranks agree on, not at the code that XLA makes.

They take half of the time, or a third. Programs of the device's own tests in one process are compiled as for
users, and so are those of `tputrain run`.
"""

import jax

QUICK_XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"


def quick_xla() -> dict[str, bool | int]:
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False} if is_cpu else {}
