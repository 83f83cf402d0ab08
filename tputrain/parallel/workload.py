"""What a training step of a model asks for: products, bytes kept, parameters; by part of the model.

A part is a repeated layer (the elements of a ModuleList that are alike count as one), or the rest. Sizes and
times follow from the rows of a batch on straight lines, and from how many ranks share a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tputrain import device as devices
from tputrain.parallel.slices import divides
from tputrain.parallel.tracing import Bytes, Cut, Product

TILE_ROWS = 8
"""Of a TPU's tile in 32 bits, which has 128 columns: products pad to it, and several shards share one."""
CONTEXT_DEGREES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Amount:
    """Bytes on a device, as they follow from its rows of the batch and from tensor parallelism."""

    fixed: float = 0.0
    fixed_cut: float = 0.0
    row: float = 0.0
    row_cut: float = 0.0
    square: float = 0.0
    """Of each pair of rows: the scores of a loss that compares them."""

    def at(self, rows: float, tensor: int) -> float:
        line = self.fixed + self.fixed_cut / tensor + rows * (self.row + self.row_cut / tensor)
        return line + rows**2 * self.square

    def plus(self, other: "Amount") -> "Amount":
        return Amount(
            self.fixed + other.fixed,
            self.fixed_cut + other.fixed_cut,
            self.row + other.row,
            self.row_cut + other.row_cut,
            self.square + other.square,
        )

    @classmethod
    def through(cls, rows: Sequence[int], found: Sequence[Bytes]) -> "Amount":
        """The line through what was found with two numbers of rows, the parabola with three."""
        (first, second), (few, many) = rows[:2], found[:2]
        span = second - first
        square = 0.0
        if len(rows) > 2:  # as far apart
            square = max(0.0, (found[2].total - 2 * many.total + few.total) / (2 * span**2))
        row = (many.whole - few.whole) / span - square * (first + second)
        row_cut = (many.cut - few.cut) / span
        fixed, fixed_cut = few.whole - first * row - first**2 * square, few.cut - first * row_cut
        return cls(max(fixed, 0.0), max(fixed_cut, 0.0), row, row_cut, square)


@dataclass(frozen=True)
class Work:
    """Products of one shape, with one row of the batch."""

    product: Product
    count: int
    scales: tuple[str, ...]
    """The dimensions that are as many times larger with more rows, of batch, m, k, n. Two where rows are
    compared with rows."""

    def sizes(self, rows: float, tensor: int) -> tuple[float, float, float, float]:
        """batch, m, k, n on a device."""
        product = self.product
        found: dict[str, float] = {
            "batch": product.batch,
            "m": product.m,
            "k": product.k,
            "n": product.n,
        }
        for name in self.scales:
            found[name] *= rows
        if product.cut is not Cut.NOT:
            found[product.cut.value] /= tensor
        return found["batch"], found["m"], found["k"], found["n"]

    def flops(self, rows: float) -> float:
        """Of all devices that share the rows."""
        return self.product.flops * self.count * rows ** len(self.scales)


@dataclass(frozen=True)
class Matrix:
    """A parameter of two dims."""

    rows: int
    elements: int
    cut: int | None
    """The dim that tensor ranks divide."""
    is_hidden: bool = False
    """Whether Muon would step it: it is trained, and between the embeddings and the output."""

    def rows_among(self, tensor: int) -> float:
        """Of a tensor rank."""
        return self.rows / tensor if self.cut == 0 else self.rows


@dataclass(frozen=True)
class Parameters:
    """Of a part, once. Numbers of elements."""

    whole: int = 0
    cut: int = 0
    trained_whole: int = 0
    trained_cut: int = 0
    largest: int = 0
    """Elements of the largest one."""
    itemsize: int = 4
    matrices: tuple[Matrix, ...] = ()

    def in_thin_shards(self, shards: int, tensor: int, itemsize: float) -> float:
        """Elements, on a tensor rank, of matrices whose shards by rows have fewer of them than a tile; by the
        share of the tile that they leave empty. `itemsize`: as they are gathered; in 16 bits a tile has twice
        as many rows.
        """
        if shards == 1:
            return 0.0
        tile = 4 * TILE_ROWS / itemsize
        return sum(
            each.elements
            / (1 if each.cut is None else tensor)
            * max(0.0, 1 - each.rows_among(tensor) / shards / tile)
            for each in self.matrices
        )

    def count(self, tensor: int) -> float:
        return self.whole + self.cut / tensor

    def trained(self, tensor: int) -> float:
        return self.trained_whole + self.trained_cut / tensor


@dataclass(frozen=True)
class Part:
    """A repeated layer, or (count 1) what is in none."""

    name: str
    count: int
    parameters: Parameters
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    forward_traffic: Amount
    backward_traffic: Amount
    input: Amount
    kept: Amount
    products_kept: Amount
    forward_peak: Amount
    backward_peak: Amount
    keys_and_values: Amount
    """Of attention, as much as a rank's own rows have."""
    held: Amount
    """While layers go backward."""
    logits: Amount
    most_logits: float
    sums: float
    """What `Trace.sums` says: there where the loss goes over blocks."""
    forward_reductions: Amount
    """Bytes that are all-reduced among tensor ranks."""
    backward_reductions: Amount
    num_reductions: int
    linears: tuple[tuple[str, int, int], ...]
    """Names of its Linear modules, with their inputs and outputs."""


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    name: str
    parts: tuple[Part, ...]
    """Layers, and last the rest."""
    sequence: int | None
    """Tokens of a row, where rows are text."""
    tensor_degrees: tuple[int, ...]
    """Degrees that divide the layers; (1,) without a plan for cutting them."""
    context_degrees: tuple[int, ...] = (1,)
    """Degrees that plans choose among; (1,) for a model of which it is not known that it takes parts of a
    sequence."""
    whole_rest: Part | None = None
    """The rest without tensor parallelism, where that changes what it does: a head that is cut makes the
    logits of its part, one that is not may make the loss of blocks."""

    def parts_among(self, tensor: int) -> tuple[Part, ...]:
        """Layers, and last the rest, as so many tensor ranks run them."""
        if tensor > 1 or self.whole_rest is None:
            return self.parts
        return (*self.parts[:-1], self.whole_rest)

    @cached_property
    def num_parameters(self) -> int:
        return sum(part.count * (part.parameters.whole + part.parameters.cut) for part in self.parts)

    def model_flops(self, rows: float) -> float:
        """FLOPs that the model asks for, as `tputrain.metrics.flops` counts: attention in full, and nothing
        that is computed again."""
        total = 0.0
        for part in self.parts:
            forward = sum(work.flops(rows) for work in part.forward)
            backward = sum(work.flops(rows) for work in part.backward)
            total += part.count * (forward + min(backward, 2 * forward))
        return total


def context_degrees(*lengths: int) -> tuple[int, ...]:
    """Those whose ranks have stretches of whole blocks of an attention kernel, for sequences of any of these
    lengths.
    """

    def is_whole(length: int, degree: int) -> bool:
        stretch = length // (2 * degree)
        return divides(length, degree) and devices.padded_length(stretch) == stretch

    return (1, *(each for each in CONTEXT_DEGREES if lengths and all(is_whole(n, each) for n in lengths)))


def for_lengths(workload: Workload, lengths: Sequence[int]) -> Workload:
    """With the context degrees that its batches take, whose rows may have any of these lengths. None: they
    are not known.
    """
    fitting = context_degrees(*lengths)
    return replace(workload, context_degrees=tuple(n for n in workload.context_degrees if n in fitting))
