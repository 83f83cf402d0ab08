"""XLA's options for tests that look at values and at what ranks agree on, not at the code that XLA makes.

They take half of the time, or a third. Programs of the device's own tests in one process are compiled as for
users, and so are those of `tputrain run`.
"""

import jax

_OPTIONS: dict[str, bool | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 12):  # that of JAX 0.12 knows no other emitters
    _OPTIONS["xla_cpu_use_fusion_emitters"] = False
QUICK_XLA_FLAGS = " ".join(f"--{name}={int(value)}" for name, value in _OPTIONS.items())


def quick_xla() -> dict[str, bool | int]:
    return _OPTIONS if jax.default_backend() == "cpu" else {}
