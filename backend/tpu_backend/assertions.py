"""`torch._assert_async`: the device looks, and whoever waits for it raises, as for an index out of range."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.library import Library

from tpu_backend.untraced import untraced


@cache
def register() -> tuple[Library, Library]:
    """Give the device both overloads, for the life of the process. Idempotent."""
    own = Library("tpu", "FRAGMENT")
    own.define("require(Tensor self, str message) -> Tensor")
    own.impl("require", untraced(lambda self, message: self.new_empty((), dtype=torch.bool)), "Meta")
    aten = Library("aten", "IMPL")
    aten.impl("_assert_async", untraced(_assert), "PrivateUse1")
    aten.impl("_assert_async.msg", untraced(_assert), "PrivateUse1")
    return own, aten


def _assert(self: Tensor, message: str = "Expected Tensor with single nonzero value, but got zero") -> None:
    if self.numel() != 1:
        torch.is_nonzero(self)  # refuses it
    torch.ops.tpu.require(self, message or "Assertion is failed")
