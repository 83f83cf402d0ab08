"""XLA's options for tests that look at values and at what ranks agree on, not at the code that XLA makes.

They take half of the time, or a third. The conftest.py of a directory says which files compile as for users;
`tputrain run` always does.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
import torch

from tpu_backend import _C
from tpu_backend.padded import serving
from tpu_backend.runtime import ahead, compiler, compiler_options

_OPTIONS: dict[str, bool | int] = {}
if jax.__version_info__ < (0, 12):  # that of JAX 0.12 has no other emitters, and level 0 flushes subnormals
    _OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
QUICK_XLA_FLAGS = " ".join(f"--{name}={int(value)}" for name, value in _OPTIONS.items())


def quick_xla() -> dict[str, bool | int]:
    return _OPTIONS if jax.default_backend() == "cpu" else {}


@contextmanager
def quick_programs() -> Iterator[None]:
    """Programs are compiled quickly in here, and nobody meets them outside."""
    options = compiler_options.options_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "options_for", lambda *given: (options(*given) or {}) | quick_xla())
        _forget_programs()
        yield
        _forget_programs()


def _forget_programs() -> None:
    if torch.tpu.is_initialized():
        ahead.forget()
        serving.forget()
        _C.forget_programs(0)
