"""XLA's options for tests that compile a function of the package by themselves and look at values alone: a
third of the time. Programs that the device compiles are compiled as its users' are.
"""

import jax


def quick_xla() -> dict[str, bool | int]:
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False} if is_cpu else {}
