"""The meshes of ranks that PyTorch was asked for: a program with collectives of several groups needs one in
which each group is what remains when some dimensions vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from types import ModuleType
from typing import Any

import numpy as np

Groups = Collection[tuple[int, ...]]

_grids: list[np.ndarray] = []  # of ranks, newest last


def watch(device_mesh: ModuleType) -> None:
    """Note each DeviceMesh that is made from here on."""
    make = device_mesh.DeviceMesh.__init__

    def make_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        note(self.mesh.numpy())

    device_mesh.DeviceMesh.__init__ = make_and_note


def note(grid: np.ndarray) -> None:
    if grid.ndim > 1 and not any(np.array_equal(grid, other) for other in _grids):
        _grids.append(grid.copy())


def grid_of(groups: Groups, rank: int) -> tuple[np.ndarray, dict[tuple[int, ...], tuple[int, ...]]] | None:
    """The newest mesh that has all of these groups of a rank, and along which dimensions it has each."""
    for grid in reversed(_grids):
        own = np.argwhere(grid == rank)
        if len(own) == 0:
            continue
        dims = {group: _dims_of(group, grid, own[0]) for group in groups}
        if all(each is not None for each in dims.values()):
            return grid, {group: each for group, each in dims.items() if each is not None}
    return None


def _dims_of(group: tuple[int, ...], grid: np.ndarray, own: np.ndarray) -> tuple[int, ...] | None:
    for count in range(1, grid.ndim + 1):
        for dims in itertools.combinations(range(grid.ndim), count):
            index = tuple(slice(None) if dim in dims else own[dim] for dim in range(grid.ndim))
            if tuple(grid[index].ravel()) == group:
                return dims
    return None
