"""What would make a plan fit, or make it faster. Each change was planned: the models find that it works."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from tputrain.figures import memory_text, seconds_text
from tputrain.models.recompute import OFFLOAD, override
from tputrain.parallel.candidate import Candidate, Task, best, candidates, with_layers
from tputrain.parallel.topology import CHIPS, Chip, Topology, shapes
from tputrain.parallel.variants import Variant, planned
from tputrain.parallel.workload import Amount, Part, Workload

SURE = 0.95
"""Of the memory. Steps that libtpu compiled took up to 4 % more than was predicted (docs/plan.md)."""
LAYERS = "model.num_hidden_layers"
_LEAST_GAIN = 0.02
_GENERATIONS = 3  # other ones that are named, those with the fewest chips
_MAX_SLOWDOWN = 4  # times that a step on other chips may take, by their peak


def what_would_be_faster(task: Task, found: Sequence[Candidate], chosen: Candidate) -> Iterator[str]:
    """Settings that make the step shorter. `found`: the task's candidates."""
    for variant, known, what in (
        (_with_masters(task), found, "bfloat16 weights and float32 copies"),
        (_with_fused_steps(task), (), "it takes layouts and checkpointing that compiled steps do not"),
    ):
        better = None if variant is None else planned(variant.task, known)
        if variant is None or better is None or better.memory is None or better.seconds is None:
            continue
        assert chosen.seconds is not None
        gain = 1 - better.seconds.total / chosen.seconds.total
        if gain >= _LEAST_GAIN:
            yield (
                f"{variant.settings}: a step {gain:.0%} shorter, {seconds_text(better.seconds.total)}, with "
                f"{memory_text(better.memory.total)} a device ({what})"
            )


def what_would_fit(task: Task, found: Sequence[Candidate]) -> Iterator[str]:
    """The smallest change first. `found`: the task's candidates, of which none can be chosen."""
    divisible, fused = _with_divisible_batch(task, found), _with_fused_steps(task)
    if divisible is not None and (_fits(divisible.task) or fused is None or not _fits(fused.task)):
        yield from _with_other_rows(divisible)
        return
    if task.degrees is not None and not task.topology.chip.is_stand_in:
        chosen = planned(free := replace(task, degrees=None))
        if chosen is not None:
            yield f"{chosen.settings(free)}{_tight(free)}"
            return
    if len(task.rungs) == 1 and task.is_built(asked := task.rungs[0]):
        least = max(map(task.built_rungs.index, asked.split(",")))
        for rung in task.built_rungs[least + (asked in task.built_rungs) :]:
            other = replace(task, rungs=(*task.rungs, rung))
            if (setting := override(rung)) and _fits(other):
                yield f"{setting}{_tight(other)}"
                return
    masters = _with_masters(task)
    if masters is not None and _fits(masters.task):
        yield f"{masters.settings}{_tight(masters.task)}"
        return
    if fused is not None and (divided := planned(fused.task)) is not None:
        yield f"{fused.settings} {divided.settings(fused.task)}{_tight(fused.task)}"
        return
    for fewer in _fewer_rows(task):
        if _fits(fewer.task):
            yield f"{fewer.settings}{_tight(fewer.task)}"
            return
    larger = _smallest_slice(task, task.topology.chip)
    if larger is not None:
        yield f"a larger slice: {larger.name}{_tight(_on_slice(task, larger))}"
        return
    others = [
        _smallest_slice(task, chip)
        for chip in CHIPS.values()
        if not chip.is_stand_in and chip.name != task.topology.chip.name
    ]
    slices = [each for each in others if each is not None]
    slices.sort(key=lambda each: (each.num_chips, -each.chip.peak_flops))
    if slices:
        said = [f"{each.name} ({_chips(each)}{_tight(_on_slice(task, each), '; ')})" for each in slices]
        yield f"other chips: {_listed(said[:_GENERATIONS])}"
    smaller = list(_smaller_task(task))
    yield from smaller
    if masters is not None and not slices and not smaller:
        for change in what_would_fit(masters.task, ()):
            yield f"{masters.settings}, and {change}"


def unbuilt_that_fits(found: Sequence[Candidate]) -> Candidate | None:
    """The best candidate among those that fit and are not chosen by themselves."""
    return best([each for each in found if each.code == "not_built"])


def is_tight(task: Task, candidate: Candidate) -> bool:
    """Whether the prediction's error may be larger than what is left of the memory."""
    return candidate.memory is not None and candidate.memory.total > SURE * task.most


def _tight(task: Task, before: str = " (") -> str:
    """What to say of a change that brings a plan which just fits."""
    found = planned(task)
    if found is None or found.memory is None or not is_tight(task, found):
        return ""
    end = ")" if before == " (" else ""
    size = f"{memory_text(found.memory.total)} of {memory_text(task.most)}"
    return f"{before}tight, {size}: --compile says whether it fits{end}"


def _chips(topology: Topology) -> str:
    return f"{topology.num_chips:,} chip{'s' * (topology.num_chips != 1)}"


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


# -- other settings ----------------------------------------------------------------------------------------


def _with_masters(task: Task) -> Variant | None:
    """With float32 weights that the optimizer alone sees, where autocast computes in bfloat16."""
    variants = task.variants
    if variants is None or variants.value("execution.autocast") != "bfloat16":
        return None
    if variants.value("optim.master_weights") or any(
        part.parameters.itemsize != 4 for part in task.workload.parts
    ):
        return None
    return variants.of(task, {"optim.master_weights": True})


def _with_fused_steps(task: Task) -> Variant | None:
    """With steps that context and tensor ranks divide."""
    if task.divides_layers or task.variants is None:
        return None
    settings = {f"execution.{phase}": "fused" for phase in task.variants.undividing_phases}
    return task.variants.of(task, settings)


def _with_divisible_batch(task: Task, found: Sequence[Candidate]) -> Variant | None:
    """With a batch that divides among the data ranks; None: the batch is not what is wrong."""
    undivided = [each for each in found if each.code == "batch" and task.is_built(each.rung)]
    if not undivided or not all(each.code in ("batch", "not_built") for each in found):
        return None
    data_ranks = min(each.layout.data_ranks for each in undivided)
    rows = max(1, (2 * task.rows + data_ranks) // (2 * data_ranks)) * data_ranks  # the nearest
    sequence = task.workload.sequence
    if (variants := task.variants) is not None:
        settings = {"batch.tokens": rows * sequence} if sequence else {"batch.samples": rows}
        asked = variants.value("batch.sequences") if sequence else 1
        if rows % asked:
            divisors = (each for each in range(data_ranks, rows + 1, data_ranks) if rows % each == 0)
            settings["batch.sequences"] = min(divisors, key=lambda each: abs(each - asked))
        return variants.of(task, settings)
    example = f"batch.tokens={rows * sequence}" if sequence else str(rows)
    said = f"a multiple of {data_ranks} {'sequences' if sequence else 'rows'} a step, such as {example}"
    return Variant(said, replace(task, rows=rows, micro_rows=task.micro_rows and rows))


def _with_other_rows(divisible: Variant) -> Iterator[str]:
    """A batch that divides, and what else it needs to fit."""
    found = tuple(candidates(divisible.task))
    settings = f"{divisible.settings} (another batch: it trains otherwise)"
    if any(each.code == "slower" for each in found):
        yield f"{settings}{_tight(divisible.task)}"
    elif _with_divisible_batch(divisible.task, found) is None:
        for change in what_would_fit(divisible.task, found):
            yield f"{settings}, and {change}"


def _fewer_rows(task: Task) -> Iterator[Variant]:
    """With smaller micro-batches, where their size is not the plan's to choose."""
    rows = task.micro_rows
    for divisor in (2, 4, 8, 16, 32):
        if rows is None or rows % divisor:
            continue
        fewer = rows // divisor
        if task.variants is None:
            said = f"micro-batches of {fewer} rows in place of {rows} (batch.sequences in a recipe of text)"
            yield Variant(said, replace(task, micro_rows=fewer))
        elif (found := task.variants.of(task, {"batch.samples": fewer})) is not None:
            yield replace(found, settings=f"{found.settings} in place of {rows}")


def _fits(task: Task) -> bool:
    rungs = [each for each in task.rungs if task.is_built(each)]
    saving_most = [rung for rung in rungs if rung != OFFLOAD][-1:]
    if OFFLOAD in rungs:  # it saves more, and the host may have no room
        saving_most.append(OFFLOAD)
    return any(each.code == "slower" for each in candidates(replace(task, rungs=tuple(saving_most))))


def _on_slice(task: Task, topology: Topology) -> Task:
    """On another slice, whose degrees are to be chosen."""
    return replace(task, topology=topology, degrees=None)


def _smallest_slice(task: Task, chip: Chip) -> Topology | None:
    """Of the task's own chips one that is larger than the task's. Of others one that is not much slower."""
    topology, parts, state = task.topology, task.workload.parts, task.precision.optimizer
    held = sum(
        part.count
        * (part.parameters.count(1) * part.parameters.itemsize + part.parameters.trained(1) * state)
        for part in parts
    )
    least, unit = held / (chip.hbm * task.usable), 1
    if chip.name == topology.chip.name:
        unit = prod(topology.shape)
        least = max(least, unit + 1)
    else:
        least = max(least, prod(topology.shape) * topology.chip.peak_flops / chip.peak_flops / _MAX_SLOWDOWN)
    for shape in shapes(chip):
        # Twice the size at least: every one of hundreds of cubes would be looked at.
        times, rest = divmod(prod(shape), unit)
        if prod(shape) < least or rest or times.bit_count() > 1:
            continue
        other = Topology(chip, shape, topology.slices)
        if _fits(_on_slice(task, other)):
            return other
    return None


def _smaller_task(task: Task) -> Iterator[str]:
    """Of the same slice: how long its rows may be, and how many layers it has room for."""
    sequence = task.workload.sequence or 0
    for times in (2, 4, 8, 16):
        if sequence > 0 and sequence % times == 0 and (shorter := _shorter(task, times)) is not None:
            yield f"data.sequence_length={sequence // times} in place of {sequence}{_tight(shorter)}"
            return
    count = sum(each.count for each in task.workload.parts[:-1])

    def is_too_much(layers: int) -> bool:
        return not _fits(with_layers(task, lambda _: layers / count))

    fitting = bisect_left(range(1, count), True, key=is_too_much)
    if fitting > 1:
        sizes = {} if task.variants is None else task.variants.sizes
        said = f"{LAYERS}={fitting}" if sizes.get(LAYERS) == count else f"a model of {fitting} layers"
        yield f"{said} in place of {count}"


def _shorter(task: Task, times: int) -> Task | None:
    """With rows of a part of their length, and as many more of them, where that fits."""
    workload = _with_rows(task.workload, 1 / times)
    assert task.workload.sequence is not None
    length = task.workload.sequence // times
    scaled = replace(task, workload=replace(workload, sequence=length), rows=task.rows * times)
    if not _fits(scaled):
        return None
    if task.variants is None:
        return scaled
    found = task.variants.of(task, {"data.sequence_length": length})
    return found.task if found is not None and _fits(found.task) else None


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
