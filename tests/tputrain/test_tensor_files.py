"""Safetensors files that several processes write, each its rows."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tputrain.checkpoint.tensor_files import Layout, TensorFiles, TensorSpec
from tputrain.errors import UserError


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "embed.weight": torch.randn(50, 16),
        "head.bias": torch.randn(7).bfloat16(),
        "mask": torch.rand(5, 3) > 0.5,
        "counts": torch.arange(9, dtype=torch.int64),
        "waves": torch.randn(4, 2, dtype=torch.complex64),
        "step": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "wide": torch.randn(6, 3, dtype=torch.float64),
        "half": torch.randn(3, 5).half(),
    }


def layout_of(tensors: dict[str, Tensor], bytes_a_file: int = 10**9) -> Layout:
    specs = {name: TensorSpec(tuple(each.shape), each.dtype) for name, each in tensors.items()}
    return Layout("model", specs, {"format": "pt"}, bytes_a_file)


def bands(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, tuple[int, Tensor]]:
    """Rows of each tensor as FSDP2 deals them out; what has no dimensions is the first rank's."""
    found = {}
    for name, tensor in tensors.items():
        if not tensor.ndim:
            if rank == 0:
                found[name] = (0, tensor)
            continue
        rows = -(-len(tensor) // world)
        found[name] = (min(rank * rows, len(tensor)), tensor[rank * rows : (rank + 1) * rows])
    return found


@pytest.mark.parametrize("bytes_a_file", [10**9, 1000, 1])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_what_ranks_write_in_any_order_is_what_safetensors_reads(
    tmp_path: Path, world: int, bytes_a_file: int
) -> None:
    tensors = some_tensors()
    layout = layout_of(tensors, bytes_a_file)
    layout.create(tmp_path)
    for rank in reversed(range(world)):
        layout_of(tensors, bytes_a_file).write(tmp_path, bands(tensors, rank, world))
    found: dict[str, Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        assert path.stat().st_size == layout.num_bytes[path.name]
        found |= load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    if layout.index is None:
        assert bytes_a_file == 10**9
    else:
        index = json.loads((tmp_path / layout.index).read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_the_parts_of_all_ranks_cover_every_byte_once(tmp_path: Path) -> None:
    tensors = some_tensors()
    layout = layout_of(tensors, 1000)
    parts = layout.create(tmp_path)
    for rank in range(3):
        parts += layout.write(tmp_path, bands(tensors, rank, 3))
    for file, size in layout.num_bytes.items():
        end = 0
        for part in sorted((part for part in parts if part.file == file), key=lambda part: part.offset):
            assert part.offset == end
            end += part.num_bytes
        assert end == size


@pytest.mark.parametrize("bytes_a_file", [10**9, 1000])
def test_a_region_is_read_from_one_file_or_several(tmp_path: Path, bytes_a_file: int) -> None:
    tensors = some_tensors()
    layout = layout_of(tensors, bytes_a_file)
    layout.create(tmp_path)
    layout.write(tmp_path, bands(tensors, 0, 1))
    files = TensorFiles(tmp_path, "model")
    assert sorted(files.names()) == sorted(tensors)
    assert files.shape("embed.weight") == (50, 16)
    assert torch.equal(files.read("embed.weight", slice(10, 20)), tensors["embed.weight"][10:20])
    assert torch.equal(files.read("embed.weight", slice(0, 50), slice(3, 5)), tensors["embed.weight"][:, 3:5])
    assert files.read("embed.weight", slice(50, 50)).shape == (0, 16)
    assert files.read("step") == 3
    for name, tensor in tensors.items():
        assert torch.equal(files.read(name), tensor)


def test_what_safetensors_itself_wrote_is_read(tmp_path: Path) -> None:
    tensors = some_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path, "model")
    assert all(torch.equal(files.read(name), tensor) for name, tensor in tensors.items())


def test_a_directory_without_files_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"):
        TensorFiles(tmp_path, "model")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a.safetensors"}}')
    with pytest.raises(UserError, match=r"'\.\./a\.safetensors': expected the name of a file beside it"):
        TensorFiles(tmp_path, "model")
    (tmp_path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=r"model\.safetensors: cannot be read"):
        TensorFiles(tmp_path, "model")
