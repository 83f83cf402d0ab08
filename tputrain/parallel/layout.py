"""Layouts: which axes of the torus each axis of the device mesh takes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from tputrain.parallel.config import DEGREES
from tputrain.parallel.topology import Axis, Topology

INNERMOST_FIRST = ("tensor", "context", "shard", "replicate")
"""Axes of the mesh. What waits for its collectives most is nearest."""
_HOP = 1e-6  # seconds; the scaling book's figure


@dataclass(frozen=True)
class Stretch:
    """A part of a torus axis: `size` devices, each `stride` links from the next."""

    axis: Axis
    size: int
    stride: int

    @property
    def is_ring(self) -> bool:
        """Whether it goes round: the whole of what is left of an axis that wraps."""
        return self.axis.wraps and self.size * self.stride == self.axis.size

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a device takes in of a gather along it. Both directions of a ring are used; the
        groups that lie between each other share their links.
        """
        return self.axis.bandwidth * (2 if self.is_ring else 1) / self.stride

    @property
    def hops(self) -> int:
        return (self.size - 1) * self.stride // (2 if self.is_ring else 1)


@dataclass(frozen=True)
class Group:
    """The devices along one axis of the mesh."""

    stretches: tuple[Stretch, ...] = ()
    slices: int = 1
    """Slices that it goes over; only replicas do."""

    @cached_property
    def size(self) -> int:
        """Within a slice."""
        return prod(each.size for each in self.stretches)

    @cached_property
    def bandwidth(self) -> float:
        return sum(each.bandwidth for each in self.stretches)

    @cached_property
    def latency(self) -> float:
        return _HOP * sum(each.hops for each in self.stretches)

    def gather_seconds(self, num_bytes: float, number: float = 1) -> float:
        """Of all-gathers to `num_bytes` together, or reduce-scatters of them, within a slice."""
        if self.size == 1:
            return 0.0
        return num_bytes * (self.size - 1) / self.size / self.bandwidth + number * self.latency

    def joined(self, other: "Group") -> "Group":
        return Group(self.stretches + other.stretches, self.slices * other.slices)


@dataclass(frozen=True)
class Layout:
    """Every device of a topology as a place in the mesh (replicate, shard, context, tensor)."""

    topology: Topology
    splits: tuple[tuple[int, int, int, int], ...]
    """Of each torus axis its factors: tensor, context, shard, replicate, the innermost first."""

    @cached_property
    def groups(self) -> dict[str, Group]:
        found: dict[str, list[Stretch]] = {name: [] for name in DEGREES}
        for axis, split in zip(self.topology.axes, self.splits, strict=True):
            stride = 1
            for name, size in zip(INNERMOST_FIRST, split, strict=True):
                if size > 1:
                    found[name].append(Stretch(axis, size, stride))
                stride *= size
        slices = self.topology.slices
        return {
            name: Group(tuple(stretches), slices if name == "replicate" else 1)
            for name, stretches in found.items()
        }

    @cached_property
    def degrees(self) -> dict[str, int]:
        return {name: group.size * group.slices for name, group in self.groups.items()}

    @cached_property
    def sharing(self) -> Group:
        """Devices of which each has a part of the parameters that a tensor rank has."""
        return self.groups["shard"].joined(self.groups["context"])

    @cached_property
    def data_ranks(self) -> int:
        """Devices that divide a batch; those of a tensor or context group share their part of it."""
        return self.degrees["replicate"] * self.degrees["shard"]

    @property
    def num_axes_used(self) -> int:
        """How many of the mesh's axes are longer than 1: how much there is to understand."""
        return sum(degree > 1 for degree in self.degrees.values())

    def index_of(self, coordinates: Sequence[int], slice_: int = 0) -> dict[str, int]:
        """The place in the mesh of the device with these coordinates along the topology's axes."""
        index = dict.fromkeys(DEGREES, 0) | {"replicate": slice_}
        for coordinate, split in zip(coordinates, self.splits, strict=True):
            for name, size in zip(INNERMOST_FIRST, split, strict=True):
                coordinate, own = divmod(coordinate, size)
                index[name] = index[name] * size + own
        return index

    def drawn_axes(self) -> tuple[int, int | None]:
        """Which axes of the topology a picture shows, across and down: the last ones longer than 1."""
        drawn = [index for index, axis in enumerate(self.topology.axes) if axis.size > 1]
        return (drawn or [len(self.topology.axes) - 1])[-1], drawn[-2] if len(drawn) > 1 else None

    def place_drawn(self, column: int, row: int) -> list[int]:
        """The coordinates of a device in that picture."""
        across, down = self.drawn_axes()
        return [{across: column, down: row}.get(index, 0) for index in range(len(self.topology.axes))]

    def describe(self, name: str) -> str:
        """Where an axis of the mesh lies: `x (ring of 16) and y/4`."""
        group = self.groups[name]
        parts = [
            f"{each.axis.name}{'' if each.size == each.axis.size else f' ({each.size} of {each.axis.size})'}"
            for each in group.stretches
        ]
        if group.slices > 1:
            parts.append(f"{group.slices} slices over DCN")
        return " x ".join(parts)


def layouts(
    topology: Topology, tensor_degrees: Sequence[int], context_degrees: Sequence[int]
) -> Iterator[Layout]:
    """All that are worth a look. An axis is divided only where a degree needs it, and equal ones are one. No
    run has tensor and context ranks both.
    """
    axes = topology.axes
    sizes = [axis.size for axis in axes]
    seen = set()
    for tensor in _factorings(sizes, tensor_degrees):
        left = [size // factor for size, factor in zip(sizes, tensor, strict=True)]
        for context in _factorings(left, context_degrees if prod(tensor) == 1 else (1,)):
            rest = [size // factor for size, factor in zip(left, context, strict=True)]
            for shard in _shares(rest):
                replicate = [size // factor for size, factor in zip(rest, shard, strict=True)]
                splits = tuple(zip(tensor, context, shard, replicate, strict=True))
                # Axes that are alike may change places.
                alike = tuple(
                    sorted(
                        (axis.size, axis.wraps, axis.bandwidth, split)
                        for axis, split in zip(axes, splits, strict=True)
                    )
                )
                if alike not in seen:
                    seen.add(alike)
                    yield Layout(topology, splits)


def _factorings(sizes: Sequence[int], degrees: Sequence[int]) -> list[tuple[int, ...]]:
    """Factors of the axes whose product is one of the degrees; at most one axis is divided."""
    wanted = set(degrees)
    return [
        factors
        for factors in product(*(_divisors(size) for size in sizes))
        if prod(factors) in wanted and _num_divided(sizes, factors) <= 1
    ]


def _shares(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Factors for the shards, of which the rest is for replicas; at most one axis is divided."""
    return [
        factors
        for factors in product(*(_divisors(size) for size in sizes))
        if _num_divided(sizes, factors) <= 1
    ]


def _num_divided(sizes: Sequence[int], factors: Sequence[int]) -> int:
    return sum(1 < factor < size for size, factor in zip(sizes, factors, strict=True))


def _divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0]


def mesh_of(layout: Layout, places: Sequence[tuple[int, ...]]) -> list[list[list[list[int]]]]:
    """Ranks as a mesh (replicate, shard, context, tensor) whose axes lie on those of the torus.

    `places`: of each rank its slice, and its coordinates along the topology's axes. Raises ValueError unless
    they are all places of the topology, once each.
    """
    sizes = [layout.topology.slices, *(axis.size for axis in layout.topology.axes)]
    ranks = {place: rank for rank, place in enumerate(places)}
    if set(ranks) != set(product(*map(range, sizes))):
        raise ValueError(f"{len(places)} devices are not those of {layout.topology.name}")
    found: dict[tuple[int, ...], int] = {}
    for (slice_, *coordinates), rank in ranks.items():
        index = layout.index_of(coordinates, slice_)
        found[tuple(index[name] for name in reversed(INNERMOST_FIRST))] = rank
    a, b, c, d = (layout.degrees[name] for name in reversed(INNERMOST_FIRST))
    return [[[[found[i, j, k, m] for m in range(d)] for k in range(c)] for j in range(b)] for i in range(a)]
