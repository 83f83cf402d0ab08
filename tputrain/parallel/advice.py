"""Sizes of a model that waste the matrix unit, and what would not.

A product's sizes are padded: the dimension that is summed over and one other to the unit's 128 or 256, the
third one to 8. What the padding computes is lost.
"""

from collections.abc import Iterator
from math import ceil

from tputrain.parallel.cost_model import CostModel, fill
from tputrain.parallel.plan import Plan
from tputrain.parallel.workload import Part, Work

_WORTH_SAYING = 0.01  # of the step
_LANES = 128


def advice(plan: Plan) -> list[str]:
    """Lines for people, the largest gain first. Gains are predicted, of the step as planned."""
    if plan.chosen is None or plan.chosen.seconds is None or plan.task.topology.chip.mxu == 1:
        return []
    found = sorted(_found(plan), reverse=True)
    return [line for gain, line in found if gain >= _WORTH_SAYING]


def _found(plan: Plan) -> Iterator[tuple[float, str]]:
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    task, chosen, total = plan.task, plan.chosen, plan.chosen.seconds.total
    tensor, mxu = chosen.layout.degrees["tensor"], task.topology.chip.mxu
    rows = chosen.rows / chosen.layout.degrees["context"]
    costs = CostModel(task.workload, task.topology, task.precision)
    times = chosen.micro_batches
    again = 1 if chosen.rung in ("none", "products") else 2  # a layer's forward pass, with its recomputation

    def seconds(part: Part, works: tuple[Work, ...], is_layer: bool) -> float:
        once = sum(costs.product_seconds(work, rows, tensor) for work in works if work in part.forward)
        back = sum(costs.product_seconds(work, rows, tensor) for work in works if work in part.backward)
        return times * part.count * (once * (again if is_layer else 1) + back)

    for index, part in enumerate(task.workload.parts):
        is_layer = index < len(task.workload.parts) - 1
        for head, of_head in _heads(part, tensor, mxu).items():
            better = ceil(head / _LANES) * _LANES
            lost = sum(
                seconds(part, (work,), is_layer)
                * (1 - _fill(work, rows, tensor, mxu) / _fill_with(work, rows, tensor, mxu, head, better))
                for work in of_head
            )
            if better != head:
                yield (
                    lost / total,
                    f"head_dim {head}: attention fills {head / mxu:.0%} of the {mxu}x{mxu} matrix unit; "
                    f"{better} with fewer heads has the same products and a step {lost / total:.0%} shorter",
                )
        for name, inputs, outputs in part.linears:
            for size, what in ((inputs, "inputs"), (outputs, "outputs")):
                own = size / tensor if _is_cut(part, inputs, outputs, what) else size
                padded = ceil(own / mxu) * mxu
                works = tuple(work for work in (*part.forward, *part.backward) if _has(work, inputs, outputs))
                lost = seconds(part, works, is_layer) / _alike(part, inputs, outputs) * (1 - own / padded)
                if own != padded:
                    divided = f" ({own:g} a tensor rank)" if own != size else ""
                    yield (
                        lost / total,
                        f"{name} has {size} {what}{divided}: computed as {padded}; "
                        f"{_nearest(size, round(size / own) * mxu)} would cost the same",
                    )
    if task.workload.sequence and task.workload.sequence % _LANES:
        padded = ceil(task.workload.sequence / _LANES) * _LANES
        lost = 1 - task.workload.sequence / padded
        yield lost, f"sequences of {task.workload.sequence}: computed as {padded} (tiles are 8 x {_LANES})"
    yield from _wide(plan)


def _wide(plan: Plan) -> Iterator[tuple[float, str]]:
    """Products of float32."""
    works = [work for part in plan.task.workload.parts for work in part.forward]
    wide = sum(work.flops(1) for work in works if work.product.itemsize >= 4)
    share = wide / max(sum(work.flops(1) for work in works), 1)
    if share > 0.5:
        yield (
            1.0,
            f"{share:.0%} of the products are of float32, which takes six passes of the matrix unit: "
            "execution.autocast=bfloat16 takes one",
        )


def _heads(part: Part, tensor: int, mxu: int) -> dict[int, list[Work]]:
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


def _nearest(size: int, tile: int) -> int:
    return ceil(size / tile) * tile
