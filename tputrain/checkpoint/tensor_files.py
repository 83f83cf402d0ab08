"""Tensors in safetensors files whose every byte has its place before anything is written.

So several processes write one file, each its own rows, and a reader takes only the rows that it needs.
Files are named as Hugging Face does: `model.safetensors`, or `model-00001-of-00002.safetensors` and so on
beside an index.
The format: https://huggingface.co/docs/safetensors/index#format
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tputrain.errors import UserError, in_words

BYTES_A_FILE = 5 * 10**9
"""The most that a file holds, but for one tensor that is larger; what transformers takes as well."""

DCP_INDEX = ".metadata"
"""The file by which a directory of torch.distributed.checkpoint is known."""

_ALIGNMENT = 8  # bytes: of the data, after the header
_LARGEST_WRITE = 1 << 30  # Linux takes no more than 2 GiB at once
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES_BY_NAME = {name: dtype for dtype, name in _DTYPES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_a_row(self) -> int:
        """A row is what one index of the first dimension selects; a tensor without dimensions is one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


class Part(NamedTuple):
    """Bytes of a file."""

    file: str
    offset: int
    num_bytes: int


class Layout:
    """Where each of `tensors` lies in which file; the same in every process that knows the same tensors.

    Within a dtype the large ones come first: what is small lies together, and can be written at once.
    """

    def __init__(
        self,
        stem: str,
        tensors: Mapping[str, TensorSpec],
        metadata: Mapping[str, str] | None = None,
        bytes_a_file: int = BYTES_A_FILE,
    ):
        self.tensors = dict(tensors)
        self.index: str | None = None
        """The name of the index file; None: one file has everything."""
        groups = list(_by_file(self.tensors, bytes_a_file))
        names = [f"{stem}.safetensors"]
        if len(groups) > 1:
            names = [f"{stem}-{i + 1:05}-of-{len(groups):05}.safetensors" for i in range(len(groups))]
            self.index = f"{stem}.safetensors.index.json"
        self.headers: dict[str, bytes] = {}
        """What each file begins with."""
        self.num_bytes: dict[str, int] = {}
        """Size of each file."""
        self._places: dict[str, tuple[str, int]] = {}
        for file, group in zip(names, groups, strict=True):
            header, offsets = _header({name: self.tensors[name] for name in group}, metadata)
            self.headers[file] = header
            self._places |= {name: (file, len(header) + offset) for name, offset in offsets.items()}
            self.num_bytes[file] = len(header) + sum(self.tensors[name].num_bytes for name in group)

    def create(self, directory: Path) -> list[Part]:
        """Make the files in their full size, with their headers, and the index; for one process.

        Returns the headers.
        """
        parts = []
        for file, header in self.headers.items():
            with (directory / file).open("xb") as opened:
                opened.write(header)
                opened.truncate(self.num_bytes[file])
            parts.append(Part(file, 0, len(header)))
        self.write_index(directory)
        return parts

    def write_index(self, directory: Path) -> None:
        """Write the index, where there are several files."""
        if self.index is not None:
            size = sum(spec.num_bytes for spec in self.tensors.values())
            files = {name: file for name, (file, _) in sorted(self._places.items())}
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": files}, indent=2) + "\n"
            (directory / self.index).write_text(text, encoding="utf-8")

    def placed(self, rows: Mapping[str, tuple[int, Tensor]]) -> Iterator[tuple[Part, memoryview]]:
        """Rows of tensors (by name the first row and the rows, on the host) as bytes and their places, in the
        order of these.
        """
        for file, offset, name in sorted(
            (*self._place(name, first), name) for name, (first, _) in rows.items()
        ):
            if (data := _bytes_of(rows[name][1])).nbytes:
                yield Part(file, offset, data.nbytes), data

    def write(self, directory: Path, rows: Mapping[str, tuple[int, Tensor]]) -> list[Part]:
        """Write rows of tensors to their places in files that are there.

        Returns which bytes that were. Raises OSError where the disk does not take them.
        """
        parts: list[Part] = []
        opened: dict[str, int] = {}
        try:
            for part, data in self.placed(rows):
                if part.file not in opened:
                    opened[part.file] = os.open(directory / part.file, os.O_WRONLY)
                _write_all(opened[part.file], data, part.offset)
                last = parts[-1] if parts else Part("", 0, 0)
                if last.file == part.file and last.offset + last.num_bytes == part.offset:
                    parts[-1] = Part(part.file, last.offset, last.num_bytes + part.num_bytes)
                else:
                    parts.append(part)
        finally:
            for descriptor in opened.values():
                os.close(descriptor)
        return parts

    def _place(self, name: str, first_row: int) -> tuple[str, int]:
        file, offset = self._places[name]
        return file, offset + first_row * self.tensors[name].bytes_a_row


def check_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise UserError where safetensors files have no such numbers."""
    if dtype not in _DTYPES:
        raise UserError(
            f"{name} is {dtype}, which a checkpoint (safetensors) cannot hold: use another dtype "
            "(for complex128: torch.view_as_real), or, if it is a buffer, register it with persistent=False"
        )


class TensorFiles:
    """The tensors of `stem` in a directory, in one file or in several: names, shapes, and any rows of them.

    Raises UserError where a file is missing, or is no safetensors file.
    """

    def __init__(self, directory: Path, stem: str):
        self._directory = directory
        self.first = weight_files(directory, stem)[0]
        """The first of the files, which an error about all of them names."""
        self._files = _files_by_name(directory, stem)

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        with _reading(self.path(name)):
            return tuple(self._open(name).get_slice(name).get_shape())

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of the whole tensor."""
        with _reading(self.path(name)):
            described = self._open(name).get_slice(name)
            return TensorSpec(tuple(described.get_shape()), _DTYPES_BY_NAME[described.get_dtype()])

    def read(self, name: str, *region: slice) -> Tensor:
        """The tensor, or a region of it (a slice a dimension, from the first); nothing else is read.

        It may keep the file mapped: copy it to where it belongs, and let go of it.
        """
        with _reading(self.path(name)):
            file = self._open(name)
            return file.get_slice(name)[region] if region else file.get_tensor(name)

    def path(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._directory / self._files[name]

    def _open(self, name: str) -> Any:
        # Each time anew: an open file stays mapped, and all that was read of it would count as our memory.
        return safe_open(self.path(name), framework="pt")


def has_tensors(directory: Path, stem: str) -> bool:
    """Whether there are files of `stem`."""
    return any((directory / f"{stem}.safetensors{rest}").is_file() for rest in ("", ".index.json"))


def weight_files(directory: Path, stem: str) -> list[Path]:
    """The files that hold the tensors of `stem`. Raises UserError where there are none."""
    single, index = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UserError(
            f"{directory}: no {single.name} and no {index.name}; reading weights in other formats can run "
            "code: save them as safetensors first"
        )
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(files.values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{index}: expected a weight_map of tensors to files") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise UserError(f"{index}: {name!r}: expected the name of a file beside it")
    return [directory / name for name in names]


def _files_by_name(directory: Path, stem: str) -> dict[str, str]:
    """What the files themselves say: an index that names other tensors misleads nobody."""
    names: dict[str, str] = {}
    for path in weight_files(directory, stem):
        with _reading(path), safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path.name)
    return names


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read ({in_words(error)})") from None


def _by_file(tensors: Mapping[str, TensorSpec], bytes_a_file: int) -> Iterator[list[str]]:
    """Names in the order of the files: the widest dtype first, so that every tensor is aligned."""
    group: list[str] = []
    size = 0
    for name in sorted(
        tensors, key=lambda name: (-tensors[name].dtype.itemsize, -tensors[name].num_bytes, name)
    ):
        if group and size + tensors[name].num_bytes > bytes_a_file:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensors[name].num_bytes
    yield group


def _header(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None
) -> tuple[bytes, dict[str, int]]:
    """What stands before the data, and where each tensor begins after it."""
    offset, offsets = 0, {}
    described: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    for name, spec in tensors.items():
        check_dtype(name, spec.dtype)
        offsets[name], offset = offset, offset + spec.num_bytes
        described[name] = {
            "dtype": _DTYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], offset],
        }
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, offsets


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    written = 0
    while written < len(data):
        written += os.pwrite(descriptor, data[written : written + _LARGEST_WRITE], offset + written)
