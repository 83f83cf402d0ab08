"""Sizes of a model and a batch that waste the matrix unit, and what would not.

A product's sizes are padded: the dimension that is summed over and one other to the unit's 128 or 256, the
third one to 8. What the padding computes is lost. Few rows waste it, too: weights are read, and gathered, for
however many there are.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

from tputrain import device as devices
from tputrain.models.recompute import LAYERS, OFFLOAD
from tputrain.parallel.cost_model import CostModel, fill
from tputrain.parallel.memory_model import num_layers_by_kind
from tputrain.parallel.variants import Settings, planned
from tputrain.parallel.workload import Part, Work

if TYPE_CHECKING:
    from tputrain.parallel.plan import Plan

_WORTH_SAYING = 0.01  # of the step
_SAME = 0.02  # of a step: one that is longer by less is about as long
_CHEAP = 0.6  # by which a step may grow for twice the rows
_LANES = 128
_NUM_HEADS = ("model.num_attention_heads", "model.num_key_value_heads")
_HEAD_DIM = "model.head_dim"


def advice(plan: "Plan") -> list[str]:
    """Lines for people, the largest gain first. With a recipe each is of a plan that was made with it."""
    if plan.chosen is None or plan.chosen.seconds is None or plan.task.topology.chip.is_stand_in:
        return []
    found = sorted(_found(plan), reverse=True)
    return [line for _, line in found]


def _found(plan: "Plan") -> Iterator[tuple[float, str]]:
    yield from _wide(plan)
    yield from _of_heads(plan)
    yield from _of_sizes(plan)
    yield from _of_rows(plan)
    yield from _of_sequences(plan)


def _growth(plan: "Plan", settings: Settings) -> tuple[str, float] | None:
    """The settings as overrides, and by how much of the step it grows with them."""
    variants = plan.task.variants
    assert variants is not None
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    variant = variants.of(plan.task, settings)
    if variant is None:
        return None
    other = planned(variant.task, plan.candidates)
    if other is None or other.seconds is None:
        return None
    return variant.settings, other.seconds.total / plan.chosen.seconds.total - 1


def _of_rows(plan: "Plan") -> Iterator[tuple[float, str]]:
    """So few rows that the weights take as long to read, or to gather, as the products of twice as many."""
    task, factor = plan.task, 2
    if task.variants is None:
        micro_rows = task.micro_rows and factor * task.micro_rows
        other = planned(replace(task, rows=factor * task.rows, micro_rows=micro_rows), plan.candidates)
        if other is None or other.seconds is None:
            return
        assert plan.chosen is not None
        assert plan.chosen.seconds is not None
        change, growth = "a larger batch", other.seconds.total / plan.chosen.seconds.total - 1
    else:
        key = "batch.tokens" if task.workload.sequence else "batch.samples"
        found = _growth(plan, {key: factor * task.rows * (task.workload.sequence or 1)})
        if found is None:
            return
        change, growth = found
    if growth <= _CHEAP:
        longer = f"{growth:.0%} longer" if growth >= 0.005 else "no longer"
        yield factor / (1 + growth) - 1, f"{change}: twice the rows in a step {longer}"


def _of_sequences(plan: "Plan") -> Iterator[tuple[float, str]]:
    """Sequences that are padded to the blocks of a kernel, or to the lanes."""
    sequence, parts = plan.task.workload.sequence, plan.task.workload.parts
    if sequence:
        padded, why = ceil(sequence / _LANES) * _LANES, f"tiles are 8 x {_LANES}"
        attention = [work.product for part in parts for work in part.forward if work.product.is_attention]
        if not attention:
            return
        if any(product.is_kernel for product in attention):
            padded, why = devices.padded_length(sequence), "a kernel's blocks"
        if (lost := 1 - sequence / padded) >= _WORTH_SAYING:
            more = f"{(padded / sequence) ** 2 - 1:.0%} more scores ({why})"
            said = f"sequences of {sequence}: attention computes {padded} tokens, {more}"
            yield lost, f"{said}; {padded} would be used in full"


class _Seconds:
    """Of products in the chosen plan's step."""

    def __init__(self, plan: "Plan"):
        assert plan.chosen is not None
        task, chosen = plan.task, plan.chosen
        self.tensor = chosen.layout.degrees["tensor"]
        self.rows = chosen.rows / chosen.layout.degrees["context"]
        self._costs = CostModel(task.workload, task.topology, task.precision)
        self._times = chosen.micro_batches
        self._rung = chosen.rung

    def of(self, part: Part, works: Sequence[Work], is_layer: bool) -> float:
        def seconds(of_pass: Sequence[Work]) -> float:
            mine = [work for work in works if work in of_pass]
            return sum(self._costs.product_seconds(work, self.rows, self.tensor) for work in mine)

        kinds = num_layers_by_kind(self._rung, part.count if is_layer else 0)
        num_forward = part.count + kinds[LAYERS] + kinds[OFFLOAD]  # with those that are computed again
        return self._times * (seconds(part.forward) * num_forward + seconds(part.backward) * part.count)


def _wide(plan: "Plan") -> Iterator[tuple[float, str]]:
    """Products of float32."""
    works = [work for part in plan.task.workload.parts for work in part.forward]
    wide = sum(work.flops(1) for work in works if work.product.itemsize >= 4)
    share = wide / max(sum(work.flops(1) for work in works), 1)
    if share <= 0.5:
        return
    said = f"{share:.0%} of the products are of float32, in six passes of the matrix unit"
    if plan.task.variants is None:
        yield 1.0, f"{said}: execution.autocast=bfloat16 takes one"
        return
    found = _growth(plan, {"execution.autocast": "bfloat16"})
    if found is not None and -found[1] >= _WORTH_SAYING:
        settings, growth = found
        yield -growth, f"{settings}: a step {-growth:.0%} shorter ({said}; bfloat16 takes one)"


# -- heads -------------------------------------------------------------------------------------------------


def _of_heads(plan: "Plan") -> Iterator[tuple[float, str]]:
    """Heads that are smaller than the matrix unit. Fewer and larger ones have the same products."""
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    task, seconds = plan.task, _Seconds(plan)
    tensor, rows, mxu = seconds.tensor, seconds.rows, task.topology.chip.mxu
    if task.variants is not None and task.variants.has_fixed_sizes:
        return
    gains: dict[int, float] = {}
    for index, part in enumerate(task.workload.parts):
        is_layer = index < len(task.workload.parts) - 1
        for head, works in _heads(part, mxu).items():
            better = ceil(head / _LANES) * _LANES
            if better == head or any(work.product.batch * head % better for work in works):
                continue  # no whole number of such heads
            gains[head] = gains.get(head, 0.0) + sum(
                seconds.of(part, (work,), is_layer)
                * (1 - _fill(work, rows, tensor, mxu) / _fill_with(work, rows, tensor, mxu, head, better))
                for work in works
            )
    for head, lost in gains.items():
        better, gain = ceil(head / _LANES) * _LANES, lost / plan.chosen.seconds.total
        if gain < _WORTH_SAYING:
            continue
        said = f"heads of {head} fill {head / mxu:.0%} of the matrix unit"
        if task.variants is None or not task.variants.sizes:
            yield (
                gain,
                f"{said}: fewer heads of {better} have the same products, and may make the step about "
                f"{gain:.0%} shorter (not planned)",
            )
            continue
        settings = _settings_of_heads(task.variants.sizes, head, better)
        found = _growth(plan, settings) if settings else None
        if found is not None and -found[1] >= _WORTH_SAYING:
            yield -found[1], f"{found[0]}: as many parameters, and a step {-found[1]:.0%} shorter ({said})"


def _settings_of_heads(sizes: Mapping[str, int], old: int, new: int) -> dict[str, int]:
    """As many features in heads of the new size; empty where they do not divide."""
    names = [name for name in _NUM_HEADS if name in sizes]
    if any(sizes[name] * old % new for name in names):
        return {}
    found = {name: sizes[name] * old // new for name in names}
    if _HEAD_DIM in sizes:
        return found | {_HEAD_DIM: new} if sizes[_HEAD_DIM] == old else {}
    return found if sizes["model.hidden_size"] == old * sizes[_NUM_HEADS[0]] else {}


def _heads(part: Part, mxu: int) -> dict[int, list[Work]]:
    """Products of attention by the size of a head, where it is smaller than the lanes or no multiple."""
    found: dict[int, list[Work]] = {}
    for work in (*part.forward, *part.backward):
        product = work.product
        if product.batch == 1 or product.has_parameter:
            continue
        head = min(product.m, product.k, product.n)
        if head % _LANES and head < 2 * mxu:
            found.setdefault(head, []).append(work)
    return found


def _fill(work: Work, rows: float, tensor: int, mxu: int) -> float:
    _, m, k, n = work.sizes(rows, tensor)
    return fill(m, k, n, mxu)


def _fill_with(work: Work, rows: float, tensor: int, mxu: int, old: int, new: int) -> float:
    sizes = [new if size == old else size for size in work.sizes(rows, tensor)[1:]]
    m, k, n = sizes
    return fill(m, k, n, mxu)


# -- sizes -------------------------------------------------------------------------------------------------


@dataclass
class _Padded:
    """Sizes of linear layers that are padded alike."""

    size: int
    own: float
    """Of a tensor rank."""
    to: int
    """What is computed."""
    names: list[str]
    lost: float


def _of_sizes(plan: "Plan") -> Iterator[tuple[float, str]]:
    """Sizes that are padded to the matrix unit: larger ones, where the step would hardly be longer."""
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    task, total = plan.task, plan.chosen.seconds.total
    variants = task.variants
    if variants is not None and variants.has_fixed_sizes:
        return
    for each in _padded(plan):
        lost = each.lost / total
        if lost < _WORTH_SAYING:
            continue
        tile = round(each.size / each.own * each.to)
        larger = ceil(each.size / tile) * tile
        divided = f" ({each.own:g} a tensor rank)" if each.own != each.size else ""
        said = f"{', '.join(each.names)}: {each.size}{divided} is computed as {each.to}"
        if variants is None or not variants.sizes:
            others = 1 - (plan.chosen.seconds.products + plan.chosen.seconds.attention) / total
            if others * (larger / each.size - 1) < _SAME:  # at most, as all else grows with it
                yield lost, f"{said}; {larger} would take about as long (not planned)"
            continue
        keys = [key for key, size in variants.sizes.items() if size == each.size]
        found = _growth(plan, {keys[0]: larger}) if len(keys) == 1 else None
        if found is not None and found[1] < _SAME:
            longer = f"{found[1]:.1%} longer" if found[1] >= 0.0005 else "no longer"
            yield lost, f"{found[0]}: a larger model in a step {longer} ({said})"


def _padded(plan: "Plan") -> list[_Padded]:
    """The sizes of linear layers that are no multiples of the matrix unit's."""
    seconds, mxu = _Seconds(plan), plan.task.topology.chip.mxu
    found: dict[tuple[int, float], _Padded] = {}
    for index, part in enumerate(plan.task.workload.parts):
        is_layer = index < len(plan.task.workload.parts) - 1
        for name, inputs, outputs in part.linears:
            for size, what in ((inputs, "inputs"), (outputs, "outputs")):
                own = size / seconds.tensor if _is_cut(part, inputs, outputs, what) else size
                to = ceil(own / mxu) * mxu
                if own == to:
                    continue
                works = [work for work in (*part.forward, *part.backward) if _has(work, inputs, outputs)]
                alike = _alike(part, inputs, outputs)
                each = found.setdefault((size, own), _Padded(size, own, to, [], 0.0))
                each.lost += seconds.of(part, works, is_layer) / alike * (1 - own / to)
                if name not in each.names:
                    each.names.append(name)
    return list(found.values())


def _has(work: Work, inputs: int, outputs: int) -> bool:
    """Whether it is a product of that matrix: forward, or one of its two in the backward pass."""
    product = work.product
    sizes = {"m": product.m, "k": product.k, "n": product.n}
    for name in work.scales:
        sizes.pop(name, None)
    return product.batch == 1 and sorted(sizes.values()) == sorted((inputs, outputs))


def _alike(part: Part, inputs: int, outputs: int) -> int:
    """Linear modules of the part with those sizes, which share their products."""
    return sum(sorted(sizes) == sorted((inputs, outputs)) for _, *sizes in part.linears)


def _is_cut(part: Part, inputs: int, outputs: int, what: str) -> bool:
    for work in part.forward:
        product = work.product
        if product.batch == 1 and (product.k, product.n) == (inputs, outputs):
            return product.cut.value == ("k" if what == "inputs" else "n")
    return False
