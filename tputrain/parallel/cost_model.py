"""Predicts the seconds of a step: products on the matrix unit, memory traffic beside them, collectives.

A step is micro-batches x (compute + tensor-parallel collectives + what of the other collectives compute does
not hide) + the optimizer + the exchange between slices. Collectives follow the scaling book: bytes over the
bandwidth of the torus axes that a group has, and 1 us a hop.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import ceil

from tputrain.models.recompute import LAYERS, NONE, OFFLOAD, PRODUCTS
from tputrain.parallel.layout import Group, Layout
from tputrain.parallel.memory_model import Precision, num_layers_by_kind
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import TILE_ROWS, Part, Work, Workload

# Where a constant comes from stands beside it. None belongs to a model.
MXU_SHARE = {"v4": 0.90, "v5e": 0.88, "v5p": 0.90, "v6e": 0.92, "tpu7x": 0.80, "cpu": 0.5}
"""Of the peak that well-shaped products reach: the TPU compiler's own estimates. v5e, v5p, tpu7x: one product
of 8192^3; v6e: those of a Llama step. v4 is taken for a v5p."""
ATTENTION_SHARE = (0.5, 0.8)
"""Of the same, of an attention kernel, forward and backward: schedules of splash attention on v6e."""
HBM_SHARE = 0.8
"""Of the memory's bandwidth that elementwise operations reach. Assumed."""
HIDDEN_SHARE = 0.9
"""Of compute, how much has gathers of FSDP beside it. Assumed; no published step depends on it."""
_SCATTERED_WITHIN = 8  # devices, on two axes; in larger groups, of a whole slice, a scatter is an all-reduce
RELAYOUT_SHARE = 0.043
"""Of the memory's bandwidth that is reached where thin shards are joined to a whole weight, for the part of a
tile that they leave empty. libtpu's estimates on v5p, for shards of 1 and 4 rows (Llama 8B in 4,096): as if
each weight were read and written once a micro-batch, since products read most of them as they come."""
_PASSES = 6  # over bfloat16 parts for a product of float32 (torch's matmul precision "highest")
_CORNER = 0.5  # of the products of a causal attention that a kernel computes, and its diagonal's waste
_DIAGONAL = 0.06


@dataclass(frozen=True)
class Seconds:
    """Of a step, by what the time goes into."""

    products: float
    attention: float
    traffic: float
    recomputed: float
    tensor: float
    """All-reduces among tensor ranks: compute waits for them."""
    context: float
    """Keys and values of other context ranks, and their gradients: compute waits for them."""
    exposed: float
    """Collectives of FSDP that compute does not hide."""
    optimizer: float
    dcn: float
    host: float
    """Offloading that compute does not hide."""
    collectives: float = 0.0
    """All of FSDP's, hidden or not; not in the sum."""

    @property
    def compute(self) -> float:
        return self.products + self.attention + self.traffic + self.recomputed

    @property
    def total(self) -> float:
        waiting = self.tensor + self.context + self.exposed + self.dcn + self.host
        return self.compute + waiting + self.optimizer

    @property
    def bound(self) -> str:
        """What takes most, in a word for people."""
        return max(SECONDS, key=lambda entry: getattr(self, entry[0]))[1]


SECONDS = (
    ("products", "products"),
    ("attention", "attention"),
    ("traffic", "memory traffic"),
    ("recomputed", "recomputation"),
    ("tensor", "waiting for tensor ranks"),
    ("context", "waiting for context ranks"),
    ("exposed", "waiting for weights and gradients"),
    ("optimizer", "optimizer"),
    ("dcn", "waiting for other slices"),
    ("host", "waiting for the host"),
)
"""The parts of a step that follow each other, each with a word for people."""


@dataclass(frozen=True)
class Moved:
    """Bytes that a device takes in from others in a step."""

    shard: float
    """Gathered parameters and scattered gradients; context ranks share in them."""
    replicate: float
    """Sums of gradients over the replicas of a slice."""
    tensor: float
    context: float
    """Keys and values, and their gradients."""
    dcn: float
    """Sums of gradients over slices."""


MOVED = (
    ("shard", "of weights and gradients"),
    ("replicate", "among replicas"),
    ("tensor", "among tensor ranks"),
    ("context", "among context ranks"),
    ("dcn", "between slices"),
)
"""Each with words for people."""


class CostModel:
    """Of a workload on a topology; what does not depend on the layout is worked out once."""

    def __init__(
        self, workload: Workload, topology: Topology, precision: Precision, scatters_wait: bool = True
    ):
        """`scatters_wait`: nothing is computed beside sums of gradients, and a scatter over all chips of a
        larger slice is an all-reduce, as in our steps. False: they have products beside them, like gathers.
        """
        self._workload, self._topology, self._precision = workload, topology, precision
        self._scatters_wait = scatters_wait
        self._known: dict[tuple[float, int, str], _MicroBatch] = {}
        self._optimizers: dict[tuple[int, int], float] = {}
        self._relayouts: dict[tuple[int, int], float] = {}

    def seconds(self, layout: Layout, rows: float, micro_batches: int, rung: str) -> Seconds:
        """Of a step of so many micro-batches, each of `rows` rows a device."""
        topology, tensor, groups = self._topology, layout.degrees["tensor"], layout.groups
        shard, context = layout.sharing, groups["context"]
        found = self._micro_batch(rows, tensor, rung)
        traffic = found.traffic + self._relayout(shard.size, tensor)
        compute = found.products + found.attention + traffic + found.recomputed
        gathers = found.gathered.seconds(shard)
        scatters = self._times_scattered(shard) * found.scattered.seconds(shard)
        scatters += 2 * found.scattered.seconds(groups["replicate"], 1 / shard.size)
        beside = gathers if self._scatters_wait else gathers + scatters
        exposed = max(0.0, beside - HIDDEN_SHARE * compute) + scatters * self._scatters_wait
        offloading = found.offloaded / topology.pcie_bandwidth
        return Seconds(
            products=micro_batches * found.products,
            attention=micro_batches * found.attention,
            traffic=micro_batches * traffic,
            recomputed=micro_batches * found.recomputed,
            tensor=micro_batches * 2 * found.reduced.seconds(groups["tensor"]),
            context=micro_batches * found.context.seconds(context, context.size),
            exposed=micro_batches * exposed,
            optimizer=self._optimizer(shard.size, tensor),
            dcn=self._between_slices(shard.size, groups["replicate"], tensor) / topology.dcn_bandwidth,
            host=micro_batches * max(0.0, offloading - HIDDEN_SHARE * compute),
            collectives=micro_batches * (gathers + scatters),
        )

    def moved(self, layout: Layout, rows: float, micro_batches: int, rung: str) -> Moved:
        """As `seconds`."""
        tensor, shard, groups = layout.degrees["tensor"], layout.sharing, layout.groups
        found = self._micro_batch(rows, tensor, rung)
        scattered = found.scattered.num_bytes
        of_shard = found.gathered.num_bytes + self._times_scattered(shard) * scattered

        def others(size: int) -> float:
            return (size - 1) / size

        return Moved(
            shard=micro_batches * of_shard * others(shard.size),
            replicate=micro_batches * 2 * scattered / shard.size * others(groups["replicate"].size),
            tensor=micro_batches * 2 * found.reduced.num_bytes * others(tensor),
            context=micro_batches * found.context.num_bytes * (groups["context"].size - 1),
            dcn=self._between_slices(shard.size, groups["replicate"], tensor),
        )

    # -- one device

    def _micro_batch(self, rows: float, tensor: int, rung: str) -> "_MicroBatch":
        key = rows, tensor, rung
        if key not in self._known:
            self._known[key] = self._all_parts(rows, tensor, rung)
        return self._known[key]

    def _all_parts(self, rows: float, tensor: int, rung: str) -> "_MicroBatch":
        found = _MicroBatch()
        *layers, rest = self._workload.parts_among(tensor)
        for part in (*layers, rest):
            seconds, count = self._part(part, rows, tensor), part.count
            kinds = num_layers_by_kind(rung, 0 if part is rest else count)
            wholly = kinds[LAYERS] + kinds[OFFLOAD]
            found.products += count * seconds.products
            found.attention += count * seconds.attention
            found.traffic += count * seconds.traffic
            cheap = seconds.forward_attention + seconds.forward_traffic
            found.recomputed += kinds[PRODUCTS] * cheap + wholly * seconds.forward
            found.gathered.add(2 * count, 2 * count * part.parameters.count(tensor) * self._gathered(part))
            found.scattered.add(count, count * part.parameters.trained(tensor) * self._scattered(part))
            reduced = (count + wholly) * part.forward_reductions.at(rows, tensor)
            reduced += count * part.backward_reductions.at(rows, tensor)
            found.reduced.add(count * part.num_reductions, reduced)
            if exchanged := part.keys_and_values.at(rows, tensor):  # gathered, and their gradients scattered
                times = 2 * count + sum(kinds.values()) - kinds[NONE]
                found.context.add(2 * times, times * exchanged)
            found.offloaded += kinds[OFFLOAD] * 2 * part.input.at(rows, tensor)
        return found

    def _part(self, part: Part, rows: float, tensor: int) -> "_PartSeconds":
        bandwidth = self._topology.hbm_bandwidth * HBM_SHARE
        forward = self._products(part.forward, rows, tensor)
        backward = self._products(part.backward, rows, tensor)
        attention = self._attention(part.forward, rows, tensor, False)
        attention_backward = self._attention(part.backward, rows, tensor, True)
        forward_traffic = part.forward_traffic.at(rows, tensor) / bandwidth
        traffic = forward_traffic + part.backward_traffic.at(rows, tensor) / bandwidth
        return _PartSeconds(
            products=forward + backward,
            attention=attention + attention_backward,
            traffic=traffic,
            forward=forward + attention + forward_traffic,
            forward_attention=attention,
            forward_traffic=forward_traffic,
        )

    def _products(self, works: Iterable[Work], rows: float, tensor: int) -> float:
        return sum(self.product_seconds(work, rows, tensor) for work in works if not self._is_attention(work))

    def _attention(self, works: Iterable[Work], rows: float, tensor: int, is_backward: bool) -> float:
        share = ATTENTION_SHARE[is_backward]
        seconds = 0.0
        for work in works:
            if self._is_attention(work):
                own = self.product_seconds(work, rows, tensor)
                if work.product.is_attention:  # a kernel
                    own *= work.product.padding / share
                    if work.product.is_causal:
                        own *= _CORNER + _DIAGONAL
                seconds += own
        return seconds

    @staticmethod
    def _is_attention(work: Work) -> bool:
        """A product of values with values, of each row and head."""
        return work.product.batch > 1 and not work.product.has_parameter

    def product_seconds(self, work: Work, rows: float, tensor: int) -> float:
        """On a device: limited by the matrix unit, or by reading and writing."""
        batch, m, k, n = work.sizes(rows, tensor)
        itemsize = work.product.itemsize
        passes = _PASSES if itemsize >= 4 and not self._topology.chip.is_stand_in else 1
        peak = self._topology.peak_flops * MXU_SHARE[self._topology.chip.name]
        used = fill(m, k, n, self._topology.chip.mxu, work.product.has_windows)
        compute = 2 * batch * m * k * n * passes / (peak * used)
        sizes = zip((m * k, k * n, m * n), work.product.uses, strict=True)
        moved = batch * sum(size / times for size, times in sizes) * itemsize
        if work.product.is_attention:
            moved = 0.0
        return work.count * max(compute, moved / self._topology.hbm_bandwidth)

    def _optimizer(self, shards: int, tensor: int) -> float:
        if (found := self._optimizers.get((shards, tensor))) is None:
            found = self._elementwise(shards, tensor) + self._orthogonal(shards, tensor)
            self._optimizers[shards, tensor] = found
        return found

    def _elementwise(self, shards: int, tensor: int) -> float:
        """Parameters, gradients and state are read, and all but the gradients written."""
        trained = sum(part.count * part.parameters.trained(tensor) for part in self._workload.parts)
        itemsize = self._workload.parts[-1].parameters.itemsize
        moved = trained / shards * (2 * self._precision.optimizer + 3 * itemsize)
        return moved / (self._topology.hbm_bandwidth * HBM_SHARE)

    def _orthogonal(self, shards: int, tensor: int) -> float:
        """Muon's iterations on hidden matrices. Ranks of which each has a part of a matrix divide the
        matrices of its shape among them; where two dims of the mesh divide it, each iterates on all.
        """
        if not self._precision.orthogonalises:
            return 0.0
        among = 1 if shards > 1 and tensor > 1 else shards * tensor
        alike: dict[tuple[int, int], int] = {}
        for part in self._workload.parts:
            for matrix in filter(lambda each: each.is_hidden, part.parameters.matrices):
                size = matrix.rows, matrix.elements // matrix.rows
                alike[size] = alike.get(size, 0) + part.count
        flops = sum(ceil(count / among) * newton_schulz_flops(*size) for size, count in alike.items())
        return flops / (self._topology.peak_flops * MXU_SHARE[self._topology.chip.name])

    # -- between devices

    def _gathered(self, part: Part) -> float:
        return self._precision.gathered or part.parameters.itemsize

    def _scattered(self, part: Part) -> float:
        return self._precision.scattered or part.parameters.itemsize

    def _relayout(self, shards: int, tensor: int) -> float:
        if (shards, tensor) not in self._relayouts:
            joined = 0.0
            for part in self._workload.parts_among(tensor):
                itemsize = self._gathered(part)
                joined += part.count * part.parameters.in_thin_shards(shards, tensor, itemsize) * itemsize
            bandwidth = self._topology.hbm_bandwidth * RELAYOUT_SHARE
            self._relayouts[shards, tensor] = 2 * joined / bandwidth  # read and written
        return self._relayouts[shards, tensor]

    def _times_scattered(self, shard: Group) -> int:
        """2 where a scatter is an all-reduce, which moves as much again."""
        has_all = shard.size == self._topology.devices_per_slice and not self._topology.chip.is_stand_in
        num_axes = len({each.axis.name for each in shard.stretches})
        is_all_reduced = has_all and (num_axes > 2 or shard.size > _SCATTERED_WITHIN)
        return 2 if is_all_reduced and self._scatters_wait else 1

    def _between_slices(self, shards: int, replicate: Group, tensor: int) -> float:
        """Bytes: slices exchange the shards of gradients, once a step."""
        if replicate.slices == 1:
            return 0.0
        gradients = sum(
            part.count * part.parameters.trained(tensor) * part.parameters.itemsize
            for part in self._workload.parts
        )
        share = 2 * (replicate.slices - 1) / replicate.slices
        return gradients / shards / replicate.size * share


@dataclass(frozen=True)
class _PartSeconds:
    """One layer, forward and backward, and of that the forward pass."""

    products: float
    attention: float
    traffic: float
    forward: float
    forward_attention: float
    forward_traffic: float


@dataclass
class _Collectives:
    """Of one kind."""

    num_bytes: float = 0.0
    """Of all, together."""
    number: float = 0.0

    def add(self, number: float, num_bytes: float) -> None:
        """`num_bytes`: of all of them."""
        self.number += number
        self.num_bytes += num_bytes

    def seconds(self, group: Group, share: float = 1.0) -> float:
        """Of gathers to so many bytes, or scatters of them. `share`: of those bytes."""
        return group.gather_seconds(self.num_bytes * share, self.number)


@dataclass
class _MicroBatch:
    """What a device does for one, in all layers and the rest."""

    # Seconds.
    products: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    recomputed: float = 0.0
    gathered: _Collectives = field(default_factory=_Collectives)
    """Parameters."""
    scattered: _Collectives = field(default_factory=_Collectives)
    """Gradients."""
    reduced: _Collectives = field(default_factory=_Collectives)
    """Among tensor ranks."""
    context: _Collectives = field(default_factory=_Collectives)
    """Keys and values, as a context rank has them of its rows."""
    offloaded: float = 0.0
    """Bytes to the host, and back."""


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Of Muon's five iterations: X X^T, its square, and the product with X (torch.optim.Muon)."""
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def fill(m: float, k: float, n: float, mxu: int, keeps_right: bool = False) -> float:
    """The share of a matrix unit that a product's sizes use, whichever factor stays in the unit.

    `keeps_right`: it is the right one, as the compiler was seen to do for convolutions.

    The dimension that is summed over, and one other, are padded to the unit's size; the third one to 8.
    """
    by_n = _used(n, mxu) * _used(m, TILE_ROWS)
    by_m = 0.0 if keeps_right else _used(m, mxu) * _used(n, TILE_ROWS)
    return _used(k, mxu) * max(by_n, by_m)


def _used(size: float, tile: int) -> float:
    return size / (ceil(size / tile - 1e-9) * tile)
