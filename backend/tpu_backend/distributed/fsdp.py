"""FSDP2's copy into one buffer, in a form that is the same in every rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor


def install(collectives: ModuleType) -> None:
    """Give the device a kernel of its own for `fsdp::all_gather_copy_in`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it replaces PyTorch's, which is what it is for
        collectives.lib.impl("all_gather_copy_in", _copy_in, "PrivateUse1")


def _copy_in(
    inputs: Sequence[Tensor], output: Tensor, split_sizes: Sequence[int], length: int, rank: int
) -> tuple[Tensor, Tensor]:
    """What is gathered, and where to. PyTorch's own packs into this rank's part of the output, so that an
    all-gather need not copy; XLA copies nothing here, and that part starts elsewhere in each rank.
    """
    with torch.no_grad():
        return torch.cat([each.reshape(-1) for each in inputs]), output
