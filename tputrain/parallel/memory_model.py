"""Predicts the memory of a device: arguments of the step's program, and its temporaries.

Arguments are there for the whole run: parameters, the optimizer's state, and gradients where micro-batches
add up. Temporaries are what is in memory at the step's worst moment, which is one of four:

- loss: everything kept for the backward pass, the logits, and the output layer gathered (and layers ahead);
- head: everything kept, and the gradient of a vocabulary's weight while it is scattered, there twice;
- layer: everything kept, one layer's own values, its weights and gradients, and those on their way;
- update: all gradients.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice

from tputrain.models.recompute import LAYERS, NONE, OFFLOAD, PRODUCTS
from tputrain.optim.config import OptimConfig
from tputrain.parallel.workload import Amount, Part, Workload

RUNGS = (NONE, PRODUCTS, LAYERS, OFFLOAD)
"""Activation checkpointing, from the fastest to the smallest. Kept for the backward pass are: all it needs;
the results of products with parameters; each layer's input; that, in the host's memory."""
_PADDING = 1.06
"""Of the temporaries: padding, and small gaps. Fitted on four steps that libtpu compiled (v5e:2x2)."""
_AHEAD = 2
"""Layers whose weights are gathered before they are used. One is live by the program's order; libtpu's
programs of 1B to 70B have as much memory as if two were."""
_BEFORE = 0.5
"""Of a layer's gradients, how much is there while those of the next one are made. Read from a step of Llama
405B that libtpu compiled for v5p:8x8x8."""
_ON_DEVICE = 2  # layers whose offloaded inputs are on their way


@dataclass(frozen=True)
class Precision:
    """Bytes of an element."""

    optimizer: float = 8.0
    """Of all state of the optimizer: two float32 moments for AdamW."""
    gathered: float | None = None
    """Of a parameter on its way to those that compute with it. None: as it is stored."""
    scattered: float | None = None
    """Of a gradient on its way. None: as its parameter is stored."""
    orthogonalises: bool = False
    """Whether the optimizer iterates on the matrices of layers (Muon)."""

    @classmethod
    def of(cls, optimizer: OptimConfig, autocast: str | None) -> "Precision":
        """With an optimizer of this library, and maybe an average or float32 copies of the parameters.

        Under autocast a TPU gathers in its dtype, of 16 bits.
        """
        num_copies = (optimizer.ema_decay is not None) + optimizer.master_weights
        return cls(
            optimizer.state_bytes + 4.0 * num_copies,
            None if autocast is None else 2.0,
            orthogonalises=optimizer.name == "muon",
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of a device."""

    parameters: float
    optimizer: float
    gradients: float
    kept: float
    working: float
    """At the worst moment: the values and gradients of one layer, or the logits."""
    gathered: float
    """Whole parameters, and gradients that are not divided yet, at the worst moment."""
    is_accumulated: bool
    moment: str
    """loss, head, layer or update"""
    host: float = 0.0
    """Offloaded to the host."""

    @cached_property
    def arguments(self) -> float:
        return self.parameters + self.optimizer + (self.gradients if self.is_accumulated else 0.0)

    @cached_property
    def temporaries(self) -> float:
        own = 0.0 if self.is_accumulated else self.gradients
        return _PADDING * (own + self.kept + self.working + self.gathered)

    @property
    def padding(self) -> float:
        """Of the temporaries: what is none of the above."""
        return self.temporaries * (1 - 1 / _PADDING)

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries


def memory(
    workload: Workload,
    *,
    shards: int,
    tensor: int,
    context: int = 1,
    rows: float,
    rung: str,
    is_accumulated: bool,
    precision: Precision,
    has_logits_twice: bool = False,
) -> Memory:
    """Of a device with `rows` rows of a micro-batch. `shards`: devices that share parameters and state.
    `context`: those that share a row, and exchange keys and values.
    `has_logits_twice`: a loss's logits and their gradient (`Chip.has_logits_twice`).
    """
    *layers, rest = parts = workload.parts_among(tensor)
    parameters = sum(each.count * each.parameters.count(tensor) * _itemsize(each) for each in parts)
    trained = sum(each.count * each.parameters.trained(tensor) for each in parts)
    gradients = sum(each.count * each.parameters.trained(tensor) * _itemsize(each) for each in parts)

    def of_others(part: Part) -> float:
        """Keys and values of the other context ranks."""
        return (context - 1) * part.keys_and_values.at(rows, tensor)

    all_kept = held_by_host = on_its_way = 0.0
    for each in layers:
        for kind, count in num_layers_by_kind(rung, each.count).items():
            kept = count * (_kept(each, kind).at(rows, tensor) + of_others(each) * (kind == NONE))
            if kind == OFFLOAD:
                held_by_host += kept
                on_its_way = max(on_its_way, _ON_DEVICE * each.input.at(rows, tensor))
            else:
                all_kept += kept
    all_kept += on_its_way

    def whole(part: Part) -> tuple[float, float]:
        """Its parameters gathered, and its gradients before they are divided."""
        if shards == 1:
            return 0.0, 0.0
        count, trained = part.parameters.count(tensor), part.parameters.trained(tensor)
        itemsize = precision.gathered or _itemsize(part)
        # They are copied when they are put together, the more the emptier their tiles are.
        count += part.parameters.in_thin_shards(shards, tensor, itemsize)
        if part is rest:  # an embedding and an output layer are not used at the same time
            share = part.parameters.largest / max(part.parameters.whole + part.parameters.cut, 1)
            count, trained = count * share, trained * share
        return count * itemsize, trained * _itemsize(part)

    ahead = _AHEAD * max((whole(each)[0] for each in layers), default=0.0)
    head, gradient = whole(rest)
    gathered = head + gradient
    logits = min(rest.logits.at(rows, tensor), rest.most_logits)
    of_loss = max(rest.forward_peak.at(rows, tensor) + logits, rest.backward_peak.at(rows, tensor))
    if has_logits_twice:
        of_loss += logits
    of_rest = rest.parameters.trained(tensor) * _itemsize(rest) / shards
    held = rest.held.at(rows, tensor)
    moments = [("update", gradients / shards, 0.0, 0.0, 0.0)]
    if rest.most_logits:  # the loss makes the weight's gradient itself: it is among what it works with
        if rest.logits.at(rows, tensor) > rest.most_logits:  # in blocks
            gathered = head
            of_loss += rest.sums
            # libtpu's figure counts a block's logits twice, if their gradient is scattered.
            of_loss += logits if gradient else 0.0
        elif gradient:  # the weight goes before it comes
            gathered = 0.0
        moments.append(("head", 0.0, all_kept, 0.0, (2 + 1 / shards) * gradient + ahead))
    moments.append(("loss", 0.0, all_kept, of_loss, gathered + ahead))
    for each in layers:
        weights, gradient = whole(each)
        # A layer's weights go as they are used, while its gradients come.
        gathered = _AHEAD * weights + max(weights, gradient) + _BEFORE * gradient
        for kind in num_layers_by_kind(rung, each.count):
            own = each.backward_peak.at(rows, tensor) + held
            if kind == NONE:
                own -= each.kept.at(rows, tensor)
            else:
                own += of_others(each)
            moments.append(("layer", of_rest, all_kept, own, gathered))
            last = _kept(each, kind).at(rows, tensor)
            moments.append(("layer", gradients / shards, last, own, gathered))
    moment, so_far, kept, working, gathered = max(moments, key=lambda each: sum(each[1:]))
    return Memory(
        parameters=parameters / shards,
        optimizer=trained * precision.optimizer / shards,
        gradients=gradients / shards if is_accumulated else so_far,
        kept=kept,
        working=working,
        gathered=gathered,
        is_accumulated=is_accumulated,
        moment=moment,
        host=held_by_host,
    )


def _itemsize(part: Part) -> int:
    return part.parameters.itemsize


def num_layers_by_kind(rung: str, count: int) -> Counter[str]:
    """How many of `count` layers are computed again in which way."""
    return Counter({rung: count} if rung in RUNGS else islice(cycle(rung.split(",")), count))


def _kept(part: Part, kind: str) -> Amount:
    """Of one layer."""
    if kind == NONE:
        return part.kept.plus(part.input)
    return part.products_kept.plus(part.input) if kind == PRODUCTS else part.input
