"""parallel.auto: the slice is found from where the chips of the ranks are, and rings stay physical."""

import pytest
import torch
from torch import nn

from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.parallel.auto import _first_batch, ascending, chips_of
from tputrain.parallel.layout import Layout, mesh_of
from tputrain.parallel.topology import Topology

V5E = "TPU v5 lite"


def by_hosts(rows: int, columns: int, first: int = 0) -> list[tuple[int, ...]]:
    """Places of ranks, host by host of 2 x 2 chips."""
    return [
        (first, x + a, y + b, 0, 0)
        for x in range(0, rows, 2)
        for y in range(0, columns, 2)
        for a in range(2)
        for b in range(2)
    ]


def test_the_slice_is_that_of_the_ranks() -> None:
    found = chips_of(V5E, by_hosts(4, 8))
    assert found is not None
    assert found.topology == Topology.parse("v5e:4x8")
    two = chips_of(V5E, [*by_hosts(4, 4, first=3), *by_hosts(4, 4, first=5)])
    assert two is not None
    assert two.topology == Topology.parse("2x v5e:4x4")
    assert two.places[16] == (1, 0, 0)
    cores = [(0, x, 0, 0, core) for x in range(2) for core in range(2)]
    chips = chips_of("TPU7x", cores)
    assert chips is not None
    assert [axis.name for axis in chips.topology.axes] == ["x", "y", "z", "core"]
    assert chips.places[1] == (0, 0, 0, 0, 1)


def test_chips_that_plans_do_not_know_have_no_slice_and_a_part_of_one_is_refused() -> None:
    assert chips_of("NVIDIA H100", [None, None]) is None
    with pytest.raises(UserError, match=r"15 ranks on v5e:4x4: expected 16, one a device; or degrees"):
        chips_of(V5E, by_hosts(4, 4)[:-1])


@pytest.mark.parametrize(
    "splits",
    [
        ((1, 1, 4, 1), (1, 1, 1, 8)),  # shards along x
        ((1, 1, 1, 4), (1, 1, 8, 1)),
        ((2, 1, 2, 1), (1, 1, 8, 1)),
        ((1, 1, 4, 1), (2, 1, 4, 1)),
    ],
)
def test_groups_are_those_of_the_layout_and_their_ranks_ascend(splits: tuple[tuple[int, ...], ...]) -> None:
    places = by_hosts(4, 8)
    chips = chips_of(V5E, places)
    assert chips is not None
    layout = Layout(chips.topology, splits)  # type: ignore[arg-type]
    planned = torch.tensor(mesh_of(layout, chips.places))
    mesh = ascending(planned)
    for dim in range(mesh.dim()):
        lines = mesh.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        assert all(line == sorted(line) for line in lines)
        of_plan = planned.movedim(dim, -1).reshape(-1, mesh.size(dim)).tolist()
        assert {tuple(line) for line in lines} == {tuple(sorted(line)) for line in of_plan}
    along_x = mesh[0, :, 0, 0].tolist() if splits[0][2] == 4 and splits[1][2] == 1 else None
    if along_x is not None:
        assert {places[rank][2] for rank in along_x} == {0}


def test_ranks_in_an_order_that_has_no_such_mesh_are_refused() -> None:
    with pytest.raises(UserError, match="ranks do not ascend along the axes of the slice"):
        ascending(torch.tensor([[0, 3], [2, 1]]))


def test_a_loader_is_where_it_was_after_its_first_batch_was_looked_at() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2, shuffle=True)
    cpu = torch.device("cpu")
    torch.manual_seed(1)
    expected = feed_of(loader, cpu).batches(0, 4)
    torch.manual_seed(1)
    assert _first_batch(loader, cpu).shape == (2,)
    assert all(map(torch.equal, feed_of(loader, cpu).batches(0, 4), expected))
    with pytest.raises(UserError, match="train_loader is a list_iterator, which gives each batch once"):
        _first_batch(iter([torch.ones(2)]), cpu)


def test_checkpointing_is_taken_off_while_the_model_is_looked_at() -> None:
    from tputrain.parallel.auto import _without_checkpointing

    kinds = ["products", "none", "products", "none"]
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in kinds)
    for layer, kind in zip(layers, kinds, strict=True):
        layer.recomputes = kind  # type: ignore[assignment]
    with _without_checkpointing(layers) as rung:
        assert [layer.recomputes for layer in layers] == ["none"] * 4
    assert rung == "products,none"
    assert [layer.recomputes for layer in layers] == kinds
    of_transformers = nn.Linear(1, 1)
    of_transformers.gradient_checkpointing = True  # type: ignore[assignment]
    with _without_checkpointing(of_transformers) as rung:
        assert not of_transformers.gradient_checkpointing
    assert rung == "layers"
    assert of_transformers.gradient_checkpointing
    with _without_checkpointing(nn.Linear(1, 1)) as rung:
        assert rung == "none"
