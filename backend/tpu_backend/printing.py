"""Printing a tpu tensor costs one host read and no compilation.

`torch._tensor_str` formats device tensors with dozens of small ops on the device, except for the devices in
a list that is written into the function (xla, lazy, ipu, mtia) and cannot be extended.  This wraps the one
function that formats a tensor's contents, so that a tpu tensor is read first; every other tensor goes through
untouched.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
import torch._tensor_str


def install() -> None:
    original = torch._tensor_str._tensor_str
    if getattr(original, "reads_tpu_first", False):
        return

    @wraps(original)
    def tensor_str(self: torch.Tensor, indent: int) -> str:
        return original(self.cpu() if self.device.type == "tpu" else self, indent)

    marked: Any = tensor_str
    marked.reads_tpu_first = True
    torch._tensor_str._tensor_str = tensor_str
