"""What `torch._assert_async` asks of the device."""

from __future__ import annotations

import jax.numpy as jnp

from tpu_backend.lowering.bounds import require_all
from tpu_backend.lowering.registry import lowering


@lowering("tpu::require")
def require(self, message):
    """A bounds check; its result is for PyTorch, whose operators have one."""
    require_all(self != 0, RuntimeError, message.replace("{", "{{").replace("}", "}}"))
    return jnp.ones((), jnp.bool_)
