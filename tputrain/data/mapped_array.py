"""An array that another process opens from its file, where it has one, and is not sent."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class MappedArray:
    """What is pickled instead of an array: the file that it maps, or else the array itself."""

    array: np.ndarray | None
    file: tuple[str, str, int, tuple[int, ...]] | None = None
    """Path, dtype, offset in bytes and shape."""

    @classmethod
    def of(cls, array: np.ndarray) -> "MappedArray":
        """Of a plain view of all of a memory-mapped file, or of any other array."""
        mapped: Any = array.base
        if isinstance(mapped, np.memmap) and mapped.filename is not None and mapped.shape == array.shape:
            return cls(None, (str(mapped.filename), mapped.dtype.str, mapped.offset, mapped.shape))
        return cls(array)

    def open(self) -> np.ndarray:
        """The array, read-only where it is a file's."""
        if self.file is None:
            assert self.array is not None
            return self.array
        path, dtype, offset, shape = self.file
        return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape))
