"""What would make a plan fit, or make it faster. Each change was planned: the models find that it works."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tputrain.models.recompute import override
from tputrain.parallel.candidate import Candidate, Task, best, candidates, with_layers
from tputrain.parallel.topology import CHIPS, Chip, Topology, shapes
from tputrain.parallel.workload import Amount, Part, Workload

_WORTH_SAYING = 0.03
_GENERATIONS = 2  # other ones that are named, those with the fewest chips


def what_would_be_faster(found: Sequence[Candidate], chosen: Candidate) -> Iterator[str]:
    """What plans do not choose yet."""
    assert chosen.seconds is not None
    unbuilt = min(
        (each for each in found if each.code == "not_built"),
        key=lambda each: each.seconds.total,  # type: ignore[union-attr]
        default=None,
    )
    if unbuilt is not None and unbuilt.seconds is not None:
        gain = 1 - unbuilt.seconds.total / chosen.seconds.total
        if gain > _WORTH_SAYING:
            yield f"{unbuilt.reason} would make the step {gain:.0%} shorter; no plan has that yet"


def what_would_fit(task: Task, found: Sequence[Candidate]) -> Iterator[str]:
    """The smallest change first. `found`: the task's candidates, of which none can be chosen."""
    undivided = [each for each in found if each.code == "batch"]
    if undivided and all(each.code in ("batch", "not_built") for each in found):
        data_ranks = min(each.layout.data_ranks for each in undivided if each.layout.degrees["context"] == 1)
        rows = -(-task.rows // data_ranks) * data_ranks
        sequence = task.workload.sequence
        example = f"batch.tokens={rows * sequence}" if sequence else str(rows)
        yield f"a multiple of {data_ranks} {'sequences' if sequence else 'rows'} a step, such as {example}"
        return
    if len(task.rungs) == 1 and task.rungs[0] in task.built_rungs:
        for rung in task.built_rungs[task.built_rungs.index(task.rungs[0]) + 1 :]:
            if (setting := override(rung)) and _fits(replace(task, rungs=(*task.rungs, rung))):
                yield setting
                return
    if task.micro_rows is not None:
        for divisor in (2, 4, 8, 16, 32):
            fewer = task.micro_rows // divisor
            if task.micro_rows % divisor == 0 and _fits(replace(task, micro_rows=fewer)):
                yield f"batch.sequences={fewer} in place of {task.micro_rows}"
                return
    larger = _smallest_slice(task, task.topology.chip)
    if larger is not None:
        yield f"a larger slice: {larger.name}"
    else:
        others = [_smallest_slice(task, chip) for chip in CHIPS.values() if chip.name != "cpu"]
        slices = sorted((each for each in others if each is not None), key=lambda each: each.num_chips)
        said = [f"{each.name} ({each.num_chips:,} chips)" for each in slices[:_GENERATIONS]]
        if said:
            yield f"another kind of chips, of which the smallest slice is {' or '.join(said)}"
    unbuilt = best([each for each in found if each.code == "not_built"])
    if unbuilt is not None:
        yield f"{unbuilt.reason}, which no plan has yet"
    if larger is None:
        yield from _smaller_task(task)


def _fits(task: Task) -> bool:
    saving_most = [each for each in task.rungs if each in task.built_rungs][-1:]
    return any(each.code == "slower" for each in candidates(replace(task, rungs=tuple(saving_most))))


def _smallest_slice(task: Task, chip: Chip) -> Topology | None:
    """Of a generation; of the task's own one that is larger than the task's."""
    topology, parts, state = task.topology, task.workload.parts, task.precision.optimizer
    held = sum(
        part.count
        * (part.parameters.count(1) * part.parameters.itemsize + part.parameters.trained(1) * state)
        for part in parts
    )
    least, unit = held / (chip.hbm * task.usable), 1
    if chip == topology.chip:
        unit = prod(topology.shape)
        least = max(least, unit + 1)
    for shape in shapes(chip):
        # Twice the size at least: every one of hundreds of cubes would be looked at.
        times, rest = divmod(prod(shape), unit)
        if prod(shape) < least or rest or times.bit_count() > 1:
            continue
        other = Topology(chip, shape, topology.slices)
        if _fits(replace(task, topology=other)):
            return other
    return None


def _smaller_task(task: Task) -> Iterator[str]:
    """Of the same slice: how long its rows may be, and how many layers it has room for."""
    workload, sequence = task.workload, task.workload.sequence or 0
    for times in (2, 4, 8, 16):
        is_divisible = sequence > 0 and sequence % times == 0
        if is_divisible and _fits(replace(task, workload=_with_rows(workload, 1 / times))):
            yield f"data.sequence_length={sequence // times} in place of {sequence}"
            return
    count = sum(each.count for each in workload.parts[:-1])

    def is_too_much(layers: int) -> bool:
        return not _fits(with_layers(task, lambda _: layers / count))

    fitting = bisect_left(range(1, count), True, key=is_too_much)
    if fitting > 1:
        yield f"a model of {fitting} layers in place of {count}"


def _with_rows(workload: Workload, share: float) -> Workload:
    """With rows of so much of their length. What grows with its square is seen too large."""

    def shorter(part: Part) -> Part:
        amounts: dict[str, Any] = {
            name: replace(each, row=share * each.row, row_cut=share * each.row_cut)
            for name, each in vars(part).items()
            if isinstance(each, Amount)
        }
        return replace(part, **amounts)

    whole_rest = workload.whole_rest and shorter(workload.whole_rest)
    return replace(workload, parts=tuple(map(shorter, workload.parts)), whole_rest=whole_rest)
