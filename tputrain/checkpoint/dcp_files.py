"""Tensors of a directory that torch.distributed.checkpoint wrote, read as `TensorFiles` are.

Its index, `.metadata`, is a pickle: only the classes that describe tensors are taken from it, so that no code
of a stranger runs. The tensors themselves PyTorch reads with weights_only=True.
"""

import pickle
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo  # in every .metadata, by this name

from tputrain.checkpoint.tensor_files import DCP_INDEX, TensorSpec
from tputrain.errors import UserError, in_words

_CLASSES = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.StorageMeta,
        dcp.TensorProperties,
        dcp.TensorStorageMetadata,
        dcp._MEM_FORMAT_ENCODING,
        _StorageInfo,
    )
}
_OF_TORCH = (torch.dtype, torch.layout)
_WEIGHTS = ("model",)
"""Where the model's weights are in a state dict that holds more, as PyTorch's tutorials have it."""
_OPTIMIZER = (("optimizer", "state"), ("optim", "state"))
"""Where an optimizer's state may be, by the names of its parameters."""


class DcpFiles:
    """The weights in a directory of torch.distributed.checkpoint: names, shapes, and any region of them.

    Those below "model", if the state dict had that key, without it; else all tensors. With `of_optimizer` its
    state, `NAME.exp_avg` of the parameter NAME. Raises UserError where the directory is no such one, or holds
    what this cannot read.
    """

    def __init__(self, directory: Path, of_optimizer: bool = False):
        self._directory = directory
        self.first = directory / DCP_INDEX
        index = _read_index(self.first)
        paths = {key: _path(key, index.planner_data) for key in index.state_dict_metadata}
        groups = _OPTIMIZER if of_optimizer else (_WEIGHTS,)
        there = [group for group in groups if any(_is_below(path, group) for path in paths.values())]
        group = there[0] if there else _OPTIMIZER[0] if of_optimizer else ()
        self._tensors: dict[str, tuple[str, dcp.TensorStorageMetadata]] = {}
        for key, described in index.state_dict_metadata.items():
            path = paths[key]
            if isinstance(described, dcp.TensorStorageMetadata) and _is_below(path, group):
                self._tensors[".".join(path[len(group) :])] = key, described
        self._places: dict[tuple[str, tuple[int, ...]], _StorageInfo] = {
            (place.fqn, tuple(place.offset or ())): info for place, info in index.storage_data.items()
        }

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self._tensors[name][1].size)

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of the whole tensor."""
        return TensorSpec(self.shape(name), self._tensors[name][1].properties.dtype)

    def read(self, name: str, *region: slice) -> Tensor:
        """The tensor, or a region of it (a slice a dimension); only chunks that it touches are read."""
        key, described = self._tensors[name]
        shape = self.shape(name)
        wanted = [each.indices(size)[:2] for each, size in zip(region or _all_of(shape), shape, strict=True)]
        found = torch.empty([stop - start for start, stop in wanted], dtype=described.properties.dtype)
        num_elements = 0
        for chunk in described.chunks:
            starts = [max(start, first) for (start, _), first in zip(wanted, chunk.offsets, strict=True)]
            stops = [
                min(stop, first + size)
                for (_, stop), first, size in zip(wanted, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            within = _shifted(starts, stops, chunk.offsets)
            part = self._read_chunk(key, tuple(chunk.offsets))[within]
            found[_shifted(starts, stops, [start for start, _ in wanted])] = part
            num_elements += part.numel()
        if num_elements != found.numel():
            raise UserError(f"{self.first}: {name}: the chunks do not make up the tensor")
        return found

    def path(self, name: str) -> Path:
        """The file that an error about a tensor names."""
        return self.first

    def _read_chunk(self, key: str, offset: tuple[int, ...]) -> Tensor:
        info = self._places[key, offset]
        path = self._directory / info.relative_path
        if info.transform_descriptors or path.parent != self._directory:
            raise UserError(f"{path}: expected a plain file beside {DCP_INDEX}, as dcp.save writes it")
        try:
            with path.open("rb") as file:
                file.seek(info.offset)
                loaded = torch.load(BytesIO(file.read(info.length)), map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise UserError(f"{path}: cannot be read ({in_words(error)})") from None
        return loaded.detach()


class _OnlyTensors(pickle.Unpickler):
    """Makes what describes tensors, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), _OF_TORCH)):
            return getattr(torch, name)
        if (module, name) == ("torch.serialization", "_get_layout"):
            return torch.serialization._get_layout
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if module.partition(".")[0] == "pathlib":
            return _joined  # where the directory was when it was written; nobody asks
        raise UserError(f"it names {module}.{name}, which is no part of a description of tensors")


def _memory_format(kind: Any, name: Any) -> dcp._MEM_FORMAT_ENCODING:
    """As Python 3.11.2 pickles members of an enum: by `getattr`. No other attribute is given."""
    if kind is not dcp._MEM_FORMAT_ENCODING or name not in kind.__members__:
        raise UserError(f"it asks for {name!r} of {kind!r}, which is no part of a description of tensors")
    return dcp._MEM_FORMAT_ENCODING[name]


def _read_index(path: Path) -> dcp.Metadata:
    try:
        with path.open("rb") as file:
            index = _OnlyTensors(file).load()
    except UserError as error:
        raise UserError(
            f"{path}: {error}: expected what dcp.save writes; nothing else is unpickled"
        ) from None
    except Exception as error:  # a pickle that is damaged may raise anything
        raise UserError(f"{path}: cannot be read ({in_words(error)})") from None
    if not isinstance(index, dcp.Metadata) or not isinstance(index.storage_data, dict):
        raise UserError(f"{path}: expected what dcp.save writes")
    return index


def _path(key: str, planner_data: Any) -> tuple[str, ...]:
    """Where the state dict had what is called `key` now."""
    path = planner_data.get(key) if isinstance(planner_data, dict) else None
    return tuple(map(str, path)) if path else (key,)


def _is_below(path: tuple[str, ...], group: tuple[str, ...]) -> bool:
    return len(path) > len(group) and path[: len(group)] == group


def _joined(*parts: str) -> str:
    return "/".join(parts)


def _all_of(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _shifted(starts: list[int], stops: list[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for start, stop, at in zip(starts, stops, origin, strict=True))
