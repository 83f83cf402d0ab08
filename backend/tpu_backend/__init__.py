"""The "tpu" device: an out-of-tree PyTorch backend that runs every operation through XLA.

``import torch`` loads this package through the ``torch.backends`` entry point, which makes the device known
and nothing more: JAX is imported at the first use of a tpu tensor.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpu_backend.attention import document_attention
    from tpu_backend.host_memory import held_by_host, taken_from_host
    from tpu_backend.jax_arrays import from_jax, to_jax
    from tpu_backend.jax_function import jax_op
    from tpu_backend.vocabulary_loss import linear_cross_entropy

__all__ = [
    "document_attention",
    "from_jax",
    "held_by_host",
    "jax_op",
    "linear_cross_entropy",
    "register",
    "taken_from_host",
    "to_jax",
]

_HOME = {
    "document_attention": "tpu_backend.attention",
    "from_jax": "tpu_backend.jax_arrays",
    "held_by_host": "tpu_backend.host_memory",
    "jax_op": "tpu_backend.jax_function",
    "linear_cross_entropy": "tpu_backend.vocabulary_loss",
    "taken_from_host": "tpu_backend.host_memory",
    "to_jax": "tpu_backend.jax_arrays",
}


def __getattr__(name: str) -> Any:
    # JAX is imported at the first use of what needs it.
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if name == "_C":  # not loaded yet, or it does not fit: then this says why
        _find_extension()
        return import_module("tpu_backend._C")
    raise AttributeError(f"module 'tpu_backend' has no attribute {name!r}")


def _autoload() -> None:
    """Called by ``import torch``.  Whatever goes wrong is one line on standard error: `import torch`
    stays unharmed.
    """
    try:
        register()
    except Exception as error:
        print(f"tputrain: the tpu device is not available: {error}", file=sys.stderr, flush=True)


def _find_extension() -> None:
    """Let `tpu_backend._C` be the one for this torch. Raises ImportError where none fits."""
    from tpu_backend import abi

    extension = str(abi.find_extension())
    if extension not in __path__:
        __path__.insert(0, extension)


def register() -> None:
    """Make the device "tpu" known to PyTorch.  Idempotent.

    Raises ImportError if the extension does not match this torch, RuntimeError if another backend already
    holds PyTorch's one slot for out-of-tree devices.
    """
    import torch
    from torch.utils import backend_registration

    if getattr(torch, "tpu", None) is not None:
        return
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", "tpu"):
        raise RuntimeError(
            f'PyTorch has one slot for an out-of-tree device and "{taken}" holds it; '
            "uninstall that package, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import only one of the two"
        )
    _find_extension()
    from tpu_backend import (
        _C,
        distributed,
        dropout_attention,
        pickling,
        printing,
        recurrent_layers,
        torch_tpu,
    )
    from tpu_backend.compiled import dispatch
    from tpu_backend.torch_tpu import adam, optimizer_steps

    backend_registration.rename_privateuse1_backend("tpu")
    _C.register_device()
    recurrent_layers.register()
    dropout_attention.register()  # a plan calls it with tensors without values, and never uses the device
    torch._register_device_module("tpu", torch_tpu)
    backend_registration.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_storage=True
    )
    printing.install()
    pickling.install()
    dispatch.install()
    torch.set_autocast_dtype("tpu", torch.bfloat16)  # PyTorch's default for a device like this is float16
    optimizer_steps.install()
    adam.install()
    distributed.install()


# A module of this package that is imported before torch must not be met half-way by the autoload that its own
# `import torch` sets off; so torch comes first, and behind what that autoload needs of this file.
import_module("torch")
