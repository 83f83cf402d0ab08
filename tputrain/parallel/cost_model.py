"""Predicts the seconds of a step: products on the matrix unit, memory traffic beside them, collectives.

A step is micro-batches x (compute + tensor-parallel collectives + what of the other collectives compute does
not hide) + the optimizer + the exchange between slices. Collectives follow the scaling book: bytes over the
bandwidth of the torus axes that a group has, and 1 us a hop.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from tputrain.models.recompute import LAYERS, OFFLOAD, PRODUCTS
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
    """All-reduces among tensor ranks, and exchanges among context ranks: compute waits for them."""
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
        return self.compute + self.tensor + self.exposed + self.optimizer + self.dcn + self.host

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
    ("exposed", "waiting for data ranks"),
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
    ("shard", "among data ranks"),
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
        self._known: dict[tuple[float, int], dict[int, _PartSeconds]] = {}
        self._optimizers: dict[tuple[int, int], float] = {}
        self._relayouts: dict[tuple[int, int, int], float] = {}

    def seconds(self, layout: Layout, rows: float, micro_batches: int, rung: str) -> Seconds:
        """Of a step of so many micro-batches, each of `rows` rows a device."""
        topology, degrees = self._topology, layout.degrees
        tensor = degrees["tensor"]
        parts = self._parts(rows, tensor)
        products = attention = traffic = recomputed = gathers = scatters = waiting = offloaded = 0.0
        shard = layout.sharing
        replicate = layout.groups["replicate"]
        for index, part in enumerate(self._workload.parts_among(tensor)):
            found, count = parts[index], part.count
            is_layer = index < len(self._workload.parts) - 1
            products += count * found.products
            attention += count * found.attention
            traffic += count * (found.traffic + self._relayout(index, part, shard.size, tensor))
            kinds = num_layers_by_kind(rung, count if is_layer else 0)
            wholly = kinds[LAYERS] + kinds[OFFLOAD]
            again = found.forward_attention + found.forward_traffic
            recomputed += kinds[PRODUCTS] * again + wholly * found.forward
            gathers += count * 2 * shard.gather_seconds(part.parameters.count(tensor) * self._gathered(part))
            scatters += count * self._scatter(part, shard, replicate, tensor)
            reductions = self._reductions(part, rows, tensor, wholly)
            group = layout.groups["tensor"]
            waiting += count * (
                2 * group.gather_seconds(reductions) + 2 * part.num_reductions * group.latency
            )
            waiting += count * self._context(part, layout.groups["context"], rows, tensor, is_layer)
            offloaded += kinds[OFFLOAD] * 2 * part.input.at(rows, tensor) / topology.pcie_bandwidth
        compute = products + attention + traffic + recomputed
        beside = gathers if self._scatters_wait else gathers + scatters
        exposed = max(0.0, beside - HIDDEN_SHARE * compute) + scatters * self._scatters_wait
        unhidden = max(0.0, offloaded - HIDDEN_SHARE * compute)
        times = micro_batches
        return Seconds(
            products=times * products,
            attention=times * attention,
            traffic=times * traffic,
            recomputed=times * recomputed,
            tensor=times * waiting,
            exposed=times * exposed,
            optimizer=self._optimizer(shard.size, tensor),
            dcn=self._between_slices(shard.size, replicate, tensor) / topology.dcn_bandwidth,
            host=times * unhidden,
            collectives=times * (gathers + scatters),
        )

    def moved(self, layout: Layout, rows: float, micro_batches: int, rung: str) -> Moved:
        """As `seconds`."""
        tensor, shard, groups = layout.degrees["tensor"], layout.sharing, layout.groups
        gathered = scattered = reduced = context = 0.0
        for index, part in enumerate(self._workload.parts_among(tensor)):
            is_layer = index < len(self._workload.parts) - 1
            kinds = num_layers_by_kind(rung, part.count if is_layer else 0)
            gathered += part.count * 2 * part.parameters.count(tensor) * self._gathered(part)
            scattered += part.count * self._gradients(part, tensor)
            reduced += part.count * self._reductions(part, rows, tensor, kinds[LAYERS] + kinds[OFFLOAD])
            if is_layer and groups["context"].size > 1:
                context += part.count * 3 * self._keys_and_values(part, groups["context"], rows, tensor)

        def others(size: int) -> float:
            return (size - 1) / size

        own = scattered / shard.size
        return Moved(
            shard=micro_batches * (gathered + self._times_scattered(shard) * scattered) * others(shard.size),
            replicate=micro_batches * 2 * own * others(groups["replicate"].size),
            tensor=micro_batches * 2 * reduced * others(tensor),
            context=micro_batches * context * others(groups["context"].size),
            dcn=self._between_slices(shard.size, groups["replicate"], tensor),
        )

    # -- one device

    def _parts(self, rows: float, tensor: int) -> "dict[int, _PartSeconds]":
        found = self._known.get((rows, tensor))
        if found is None:
            parts = enumerate(self._workload.parts_among(tensor))
            found = {index: self._part(part, rows, tensor) for index, part in parts}
            self._known[rows, tensor] = found
        return found

    def _part(self, part: Part, rows: float, tensor: int) -> "_PartSeconds":
        bandwidth = self._topology.hbm_bandwidth * HBM_SHARE
        forward = self._products(part.forward, rows, tensor, False)
        backward = self._products(part.backward, rows, tensor, True)
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

    def _products(self, works: Iterable[Work], rows: float, tensor: int, is_backward: bool) -> float:
        return sum(self.product_seconds(work, rows, tensor) for work in works if not self._is_attention(work))

    def _attention(self, works: Iterable[Work], rows: float, tensor: int, is_backward: bool) -> float:
        share = ATTENTION_SHARE[is_backward]
        seconds = 0.0
        for work in works:
            if self._is_attention(work):
                own = self.product_seconds(work, rows, tensor)
                if work.product.is_attention:  # a kernel
                    own /= share
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
        compute = 2 * batch * m * k * n * passes / (peak * fill(m, k, n, self._topology.chip.mxu))
        moved = batch * (m * k + k * n + m * n) * itemsize
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

    def _relayout(self, index: int, part: Part, shards: int, tensor: int) -> float:
        if (found := self._relayouts.get((index, shards, tensor))) is None:
            itemsize = self._gathered(part)
            moved = (
                2 * part.parameters.in_thin_shards(shards, tensor, itemsize) * itemsize
            )  # read and written
            found = moved / (self._topology.hbm_bandwidth * RELAYOUT_SHARE)
            self._relayouts[index, shards, tensor] = found
        return found

    def _gradients(self, part: Part, tensor: int) -> float:
        """Bytes."""
        return part.parameters.trained(tensor) * (self._precision.scattered or part.parameters.itemsize)

    def _scatter(self, part: Part, shard: Group, replicate: Group, tensor: int) -> float:
        """Of gradients, and the sums of their shards over replicas."""
        gradients = self._gradients(part, tensor)
        times = self._times_scattered(shard)
        return times * shard.gather_seconds(gradients) + 2 * replicate.gather_seconds(gradients / shard.size)

    def _times_scattered(self, shard: Group) -> int:
        """2 where a scatter is an all-reduce, which moves as much again."""
        has_all = shard.size == self._topology.devices_per_slice and not self._topology.chip.is_stand_in
        num_axes = len({each.axis.name for each in shard.stretches})
        is_all_reduced = has_all and (num_axes > 2 or shard.size > _SCATTERED_WITHIN)
        return 2 if is_all_reduced and self._scatters_wait else 1

    @staticmethod
    def _reductions(part: Part, rows: float, tensor: int, num_again: float) -> float:
        """Bytes that tensor ranks sum in each of the part's layers, of which so many are computed again."""
        forward = part.forward_reductions.at(rows, tensor)
        return forward * (1 + num_again / max(part.count, 1)) + part.backward_reductions.at(rows, tensor)

    def _context(self, part: Part, group: Group, rows: float, tensor: int, is_layer: bool) -> float:
        """Keys and values of all the sequence, gathered forward and backward, and their gradients."""
        if group.size == 1 or not is_layer:
            return 0.0
        return 3 * group.gather_seconds(self._keys_and_values(part, group, rows, tensor))

    @staticmethod
    def _keys_and_values(part: Part, group: Group, rows: float, tensor: int) -> float:
        """Bytes, of all the sequence. They are at most as large as the layer's input."""
        return 2 * part.input.at(rows, tensor) * group.size / tensor

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


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Of Muon's five iterations: X X^T, its square, and the product with X (torch.optim.Muon)."""
    short, long = sorted((rows, columns))
    return 5 * (4 * short**2 * long + 2 * short**3)


def fill(m: float, k: float, n: float, mxu: int) -> float:
    """The share of a matrix unit that a product's sizes use, whichever factor stays in the unit.

    The dimension that is summed over, and one other, are padded to the unit's size; the third one to 8.
    """
    by_n = _used(n, mxu) * _used(m, TILE_ROWS)
    by_m = _used(m, mxu) * _used(n, TILE_ROWS)
    return _used(k, mxu) * max(by_n, by_m)


def _used(size: float, tile: int) -> float:
    return size / (ceil(size / tile - 1e-9) * tile)
