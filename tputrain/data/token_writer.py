"""Token arrays that are written document by document, so that no more than one is in memory."""

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

_HEADER = 128  # bytes: what NumPy writes for any one-dimensional array


class TokenWriter:
    """Writes `stem`.npy (tokens), `stem`_offsets.npy (where each document starts, the end last) and
    `stem`_learned.npy (which tokens are learned), as `numpy.load` reads them.
    """

    def __init__(self, stem: Path, dtype: type[np.unsignedinteger], has_learned: bool):
        self._stem, self._dtype, self._has_learned = stem, np.dtype(dtype), has_learned
        self._offsets = array("q", [0])
        self._files = ExitStack()

    @property
    def num_tokens(self) -> int:
        """Written so far."""
        return self._offsets[-1]

    def __enter__(self) -> "TokenWriter":
        self._tokens = self._open("")
        self._learned = self._open("_learned") if self._has_learned else None
        return self

    def write(self, ids: Sequence[int], learned: np.ndarray | None) -> None:
        """One more document; `learned`: bool, a token."""
        self._tokens.write(np.array(ids, self._dtype).tobytes())
        if self._learned is not None:
            assert learned is not None
            self._learned.write(learned.tobytes())
        self._offsets.append(self.num_tokens + len(ids))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._files:
            if error is None:
                self._write_header(self._tokens, self._dtype)
                if self._learned is not None:
                    self._write_header(self._learned, np.dtype(bool))
                np.save(f"{self._stem}_offsets.npy", np.array(self._offsets))

    def _open(self, ending: str) -> BinaryIO:
        file = open(f"{self._stem}{ending}.npy", "wb")  # noqa: SIM115, closed with the others
        self._files.enter_context(file)
        file.write(bytes(_HEADER))
        return file

    def _write_header(self, file: BinaryIO, dtype: np.dtype) -> None:
        file.seek(0)
        described = {"descr": dtype.str, "fortran_order": False, "shape": (self.num_tokens,)}
        np.lib.format.write_array_header_1_0(file, described)
        assert file.tell() == _HEADER
