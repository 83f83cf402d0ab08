"""Running an operator on the CPU, for kernels in Python that serve some of its forms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from tpu_backend import _C


def on_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """What the CPU's kernel says: PyTorch's errors about wrong arguments, or the result.

    A result with elements counts as a fallback.
    """
    device = next(leaf.device for leaf in tree_leaves((args, kwargs)) if is_on_device(leaf))
    host_args, host_kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), (args, kwargs))
    results = op(*host_args, **host_kwargs)
    if any(leaf.numel() for leaf in tree_leaves(results)):
        _C.count_fallback(op.name())
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), results)


def is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "tpu"
