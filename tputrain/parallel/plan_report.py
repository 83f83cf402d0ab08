"""A plan for people: a table, a picture of the torus with the axes of the mesh on it, and why."""

from collections.abc import Iterator, Sequence
from string import ascii_lowercase, ascii_uppercase

from tputrain.figures import memory_text, percent, seconds_text
from tputrain.parallel.candidate import Candidate
from tputrain.parallel.config import DEGREES
from tputrain.parallel.cost_model import MOVED, SECONDS
from tputrain.parallel.layout import INNERMOST_FIRST, Layout
from tputrain.parallel.memory_model import Memory
from tputrain.parallel.plan import Plan

_DRAWN = (8, 4)  # devices of an axis in the picture, across and down
_LETTERS = f"{ascii_uppercase}{ascii_lowercase}"  # one for each replica that can be drawn
_OTHERS = 4  # further plans in the table
_LEAST_SHOWN = 0.005  # of the memory


def lines(plan: Plan) -> Iterator[str]:
    """All that there is to say of a plan that fits."""
    chosen, task = plan.chosen, plan.task
    assert chosen is not None
    assert chosen.memory is not None
    assert chosen.seconds is not None
    topology, workload = task.topology, task.workload
    is_tpu = not topology.chip.is_stand_in
    chip, plural = ("chip", "s") if is_tpu else ("process", "es")
    chips = f"{topology.num_chips:,} {chip}{plural * (topology.num_chips != 1)}"
    yield (
        f"{workload.name}, {workload.num_parameters:,} parameters, on {topology.name}: "
        f"{chips}, {topology.chips_per_host} a host"
    )
    tokens = f" x {workload.sequence:,} tokens" if workload.sequence else ""
    yield f"a step: {task.rows:,} row{'s' * (task.rows != 1)}{tokens}"
    yield ""
    yield from in_columns(table_of_plans(plan))
    yield ""
    yield from picture(chosen.layout)
    yield ""
    memory, seconds = chosen.memory, chosen.seconds
    moment = f"worst at the {memory.moment}"
    yield f"memory  {memory_text(memory.total)} of {memory_text(task.most)} a device (predicted), {moment}"
    arguments, temporaries = ARGUMENTS, (*TEMPORARIES, *GRADIENTS)
    if memory.is_accumulated:
        arguments, temporaries = (*ARGUMENTS, *GRADIENTS), TEMPORARIES
    yield f"        arguments {memory_text(memory.arguments)}: {_parts(memory, arguments)}"
    yield f"        temporaries {memory_text(memory.temporaries)}: {_parts(memory, temporaries)}"
    if memory.host:
        yield f"        in the host's memory {memory_text(memory.host)} a device"
    mfu = f"MFU {percent(chosen.mfu)}, " if is_tpu else ""
    yield (
        f"step    {seconds_text(seconds.total)} (predicted), {mfu}"
        f"{plan.speed(seconds.total):,.0f} {plan.unit}/s a {chip}; bound by {seconds.bound}"
    )
    yield f"        {_times(chosen)}"
    moved = chosen.moved(task)
    if sizes := [f"{memory_text(size)} {words}" for name, words in MOVED if (size := getattr(moved, name))]:
        yield f"moves   {', '.join(sizes)}, into each device (predicted)"
    if chosen.mfu > HIGHEST_PUBLISHED_MFU and is_tpu:
        is_longer = (workload.sequence or 0) > _PUBLISHED_LENGTH
        longer = f" (those have up to {_PUBLISHED_LENGTH:,} tokens; attention counts in full)" * is_longer
        yield (
            f"        expect less: no published step of a dense model on TPUs has over "
            f"{HIGHEST_PUBLISHED_MFU:.0%} MFU{longer}; --compile asks the TPU's compiler"
        )
    yield f"set     {chosen.settings(task)}"
    for number, reason in enumerate(plan.why):
        yield f"{'why' if number == 0 else '':7} {reason}"
    for number, change in enumerate(plan.changes):
        yield f"{'change' if number == 0 else '':7} {change}"
    for number, note in enumerate(plan.notes):
        yield f"{'note' if number == 0 else '':7} {note}"


HIGHEST_PUBLISHED_MFU = 0.70
"""Of MaxText's 64B model on v5p-128, by its makers: AI-Hypercomputer/maxtext, README."""
_PUBLISHED_LENGTH = 8192  # tokens of the longest sequences of published steps

Names = tuple[tuple[str, str], ...]
"""Fields, each with a word for it."""
ARGUMENTS: Names = (("parameters", "parameters"), ("optimizer", "optimizer state"))
GRADIENTS: Names = (("gradients", "gradients"),)
"""They are arguments where several micro-batches make a step."""
TEMPORARIES: Names = (
    ("kept", "kept for the backward pass"),
    ("working", "of the current layer"),
    ("gathered", "gathered"),
    ("padding", "padding"),
)


def _parts(memory: Memory, names: Names) -> str:
    total = sum(getattr(memory, name) for name, _ in names)
    values = [(getattr(memory, name), word) for name, word in names]
    return ", ".join(
        f"{word} {memory_text(value)}" for value, word in values if value >= _LEAST_SHOWN * total
    )


def _times(chosen: Candidate) -> str:
    seconds = chosen.seconds
    assert seconds is not None
    shares = sorted(((getattr(seconds, name) / seconds.total, word) for name, word in SECONDS), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)


def alternatives(plan: Plan) -> list[tuple[str, Candidate]]:
    """The plan, and the best ones that differ from it in more than where they lie; with a word for each."""
    assert plan.chosen is not None
    found = [("plan", plan.chosen)]
    seen = {_kind(plan.chosen)}
    others = sorted(
        (each for each in plan.candidates if each.code in ("slower", "not_built")),
        key=lambda each: each.seconds.total if each.seconds else 0.0,
    )
    for each in others:
        if _kind(each) not in seen and len(found) <= _OTHERS:
            seen.add(_kind(each))
            found.append(("not built" if each.code == "not_built" else "", each))
    return found


def table_of_plans(plan: Plan) -> list[tuple[str, ...]]:
    """The plan and its alternatives, below a header."""
    header = ("", *DEGREES, "checkpointing", "rows", "micro-batches", "memory", "step", "MFU")
    cells: list[tuple[str, ...]] = [header]
    for what, each in alternatives(plan):
        assert each.memory is not None
        assert each.seconds is not None
        cells.append(
            (
                what,
                *(str(each.layout.degrees[name]) for name in DEGREES),
                each.rung,
                str(each.rows),
                str(each.micro_batches),
                memory_text(each.memory.total),
                seconds_text(each.seconds.total),
                percent(each.mfu),
            )
        )
    if plan.task.topology.chip.is_stand_in:  # whose peak nobody measured
        return [row[:-1] for row in cells]
    return cells


def in_columns(cells: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    for row in cells:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _kind(candidate: Candidate) -> tuple[object, ...]:
    degrees = candidate.layout.degrees
    return degrees["tensor"], degrees["context"], degrees["replicate"] > 1, candidate.rung


def picture(layout: Layout) -> list[str]:
    """One plane of a slice, and what its axes, letters and lines mean."""
    axes, splits = layout.topology.axes, layout.splits
    across, down = layout.drawn_axes()
    columns = min(axes[across].size, _DRAWN[0])
    rows = 1 if down is None else min(axes[down].size, _DRAWN[1])
    found: list[str] = []
    letters: dict[int, str] = {}
    for row in range(rows):
        line = ""
        for column in range(columns):
            replica = layout.index_of(layout.place_drawn(column, row))["replicate"]
            line += letters.setdefault(replica, _LETTERS[len(letters)])
            is_joined = (column + 1) % splits[across][0] != 0 and column + 1 < columns
            line += "-" if is_joined else " "
        found.append(f"    {line}{'...' if axes[across].size > columns else ''}".rstrip())
    if down is not None and axes[down].size > rows:
        found.append("    ...")
    lines_mean = "; -: ranks of tensor parallelism" if any("-" in line for line in found) else ""
    return [
        *legend(layout, ("→", "↓", " ")),
        *found,
        f"    a letter: a device; the same letter: one replica of all parameters{lines_mean}",
    ]


def legend(layout: Layout, marks: tuple[str, str, str]) -> list[str]:
    """What lies along each axis of a slice; marked where the picture shows it: across, down, not at all."""
    across, down = layout.drawn_axes()
    found = []
    for index, axis in enumerate(layout.topology.axes):
        if axis.size == 1:
            continue
        mark = marks[0] if index == across else marks[1] if index == down else marks[2]
        kind = "a ring" if axis.wraps else "a line"
        split = zip(INNERMOST_FIRST, layout.splits[index], strict=True)
        names = [f"{name} {size}" for name, size in split if size > 1]
        found.append(f"{mark} {axis.name} {axis.size}, {kind}: {' x '.join(reversed(names))}")
    if layout.topology.slices > 1:
        found.append(f"{marks[2]} {layout.topology.slices} such slices, over DCN: replicate")
    return found
