"""The page of a plan: the torus with the axes of the mesh on it, memory, the time line of a step, and why."""

from collections.abc import Callable, Iterable, Sequence
from html import escape

from tputrain.figures import memory_text, percent, seconds_text
from tputrain.parallel.candidate import Candidate
from tputrain.parallel.cost_model import SECONDS
from tputrain.parallel.plan import Plan
from tputrain.parallel.plan_report import ARGUMENTS, GRADIENTS, TEMPORARIES, table_of_plans
from tputrain.planning.compiled_step import BAND, SECONDS_OF_STEP, CompiledStep
from tputrain.planning.peak import Peak
from tputrain.report.document import document
from tputrain.report.torus import torus

_MEMORY = (*ARGUMENTS, *GRADIENTS, *TEMPORARIES)

Parts = Sequence[tuple[str, float]]
"""What follows each other on a bar, each with its length."""


def plan_page(plan: Plan, step: CompiledStep | None = None, changes: Sequence[str] | None = None) -> str:
    """HTML of a plan that fits, and of what the compiler says of it. Names from the recipe are escaped.

    `changes`: those of the models' choice, where a search chose another plan. None: the plan's own.
    """
    assert plan.chosen is not None
    task, chosen = plan.task, plan.chosen
    title = f"{task.workload.name} on {task.topology.name}"
    header, *others = table_of_plans(plan)
    body = "".join(
        (
            f"<header><h1>{escape(title)}</h1><p>{_sizes(plan, step)}</p></header>",
            _figures(plan, chosen, step),
            f"<h2>Where the ranks are</h2><figure>{torus(chosen.layout)}</figure>",
            f"<h2>Memory of a device</h2>{_memory(plan, chosen, step)}",
            f"<h2>Time line of a step</h2>{_times(chosen, step)}",
            _list("Why", plan.why),
            _list("What would pay", plan.changes if changes is None else changes),
            _list("Notes", plan.notes),
            f"<h2>Other plans</h2>{_table(header, others)}",
            "" if step is None else _compiled(step),
        )
    )
    return document(title, body)


def _sizes(plan: Plan, step: CompiledStep | None) -> str:
    task, topology = plan.task, plan.task.topology
    tokens = f" of {task.workload.sequence:,} tokens" if task.workload.sequence else ""
    hosts = f"{topology.num_hosts:,} host{'s' * (topology.num_hosts != 1)}"
    chips = f"{topology.num_chips:,} chip{'s' * (topology.num_chips != 1)}"
    whose = "All figures are predicted" if step is None else "Figures are the planner's, or the compiler's"
    return (
        f"{task.workload.num_parameters:,} parameters; {chips}, {hosts}; "
        f"a step has {task.rows:,} rows{tokens}. {whose}."
    )


def _figures(plan: Plan, chosen: Candidate, step: CompiledStep | None) -> str:
    assert chosen.memory is not None
    assert chosen.seconds is not None
    task, seconds = plan.task, chosen.seconds.total
    degrees = [f"{name} {degree}" for name, degree in chosen.layout.degrees.items() if degree > 1]
    found = {
        "ranks": " × ".join(degrees) or "one",
        "activation checkpointing": chosen.rung,
        "micro-batches": f"{chosen.micro_batches} of {chosen.rows} row{'s' * (chosen.rows != 1)} a device",
        "memory a device": f"{memory_text(chosen.memory.total)} of {memory_text(task.most)}",
        "step": f"{seconds_text(seconds)}, bound by {chosen.seconds.bound}",
        "MFU": percent(chosen.mfu),
        f"{plan.unit}/s a chip": f"{plan.speed(seconds):,.0f}",
    }
    if task.topology.chip.is_stand_in:
        del found["MFU"]  # of a peak that nobody measured
    if step is not None:
        whose = "by the compiler"
        found[f"memory a device, {whose}"] = f"{memory_text(step.memory)} of {memory_text(task.most)}"
        found[f"step, {whose}"] = f"{seconds_text(step.seconds)} ±{BAND:.0%}"
        found[f"MFU, {whose}"] = percent(plan.mfu(step.seconds))
        found[f"{plan.unit}/s a chip, {whose}"] = f"{plan.speed(step.seconds):,.0f}"
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(said)}</dd></div>" for name, said in found.items()
    )
    settings = f"<p>Run the recipe with <code>{escape(chosen.settings(task))}</code></p>"
    return f'<dl class="figures">{tiles}</dl>{settings}'


# -- bars --------------------------------------------------------------------------------------------------


def _memory(plan: Plan, chosen: Candidate, step: CompiledStep | None) -> str:
    assert chosen.memory is not None
    bars: list[tuple[str, Parts]] = [
        ("the plan", [(said, getattr(chosen.memory, name)) for name, said in _MEMORY])
    ]
    if step is not None:
        bars.append(("by the compiler", [("arguments", step.arguments), ("temporaries", step.temporaries)]))
    total = max(plan.task.most, *(sum(size for _, size in parts) for _, parts in bars))
    has = ", what a device has" if total == plan.task.most else ""
    ends = ("0", f"{memory_text(total)}{has}")
    of_host = [("the plan", chosen.memory.host), ("the compiler", 0.0 if step is None else step.host)]
    said = [f"{memory_text(size)} a device by {whom}" for whom, size in of_host if size]
    host = f"<p>In the host's memory {', '.join(said)}</p>" if said else ""
    return _bars(bars, total, ends, memory_text) + host


def _times(chosen: Candidate, step: CompiledStep | None) -> str:
    """The core's bar, and what the links do beside it: hidden collectives first, then those waited for."""
    seconds = chosen.seconds
    assert seconds is not None
    hidden = min(seconds.compute, max(0.0, seconds.collectives - seconds.exposed))
    bars: list[tuple[str, Parts]] = [
        ("core", [(said, getattr(seconds, name)) for name, said in SECONDS]),
        (
            "links",
            [
                ("FSDP beside compute", hidden),
                ("", seconds.compute - hidden),
                ("tensor parallelism", seconds.tensor),
                ("FSDP", seconds.exposed),
            ],
        ),
    ]
    total = seconds.total
    if step is not None:
        bars.append(("by the compiler", [(said, getattr(step, name)) for name, said in SECONDS_OF_STEP]))
        total = max(total, step.seconds)
    return _bars(bars, total, ("0", seconds_text(total)), seconds_text)


def _bars(
    bars: Sequence[tuple[str, Parts]], total: float, ends: tuple[str, str], form: Callable[[float], str]
) -> str:
    """Strips whose parts have lengths in proportion to `total`, each with its own legend."""
    found = []
    for name, parts in bars:
        shown = [(number, said, size) for number, (said, size) in enumerate(parts) if size > 0]
        drawn = "".join(
            f'<i class="{f"p{number % 10}" if said else "gap"}" style="width:{100 * size / total:.2f}%" '
            f'title="{escape(f"{said}: {form(size)}" if said else "idle")}"></i>'
            for number, said, size in shown
        )
        legend = "".join(
            f'<span><i class="swatch p{number % 10}"></i>{escape(said)} {form(size)}</span>'
            for number, said, size in shown
            if said and size / total >= 0.001
        )
        found.append(
            f'<div class="stack"><span>{escape(name)}</span><div>{drawn}</div></div>'
            f'<p class="legend">{legend}</p>'
        )
    scale = f'<div class="ends"><span>{escape(ends[0])}</span><span>{escape(ends[1])}</span></div>'
    return f'<div class="timeline">{"".join(found)}{scale}</div>'


# -- words and tables --------------------------------------------------------------------------------------


def _list(title: str, said: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(each)}</li>" for each in said)
    return f"<h2>{escape(title)}</h2><ul>{items}</ul>" if said else ""


def _compiled(step: CompiledStep) -> str:
    collectives = (
        (
            each.kind,
            each.axes,
            str(round(each.count)),
            memory_text(each.num_bytes),
            seconds_text(each.seconds),
        )
        for each in step.collectives
    )
    parts = ((what, seconds_text(value), f"{value / step.seconds:.0%}") for what, value in step.all_parts)
    notes = "".join(f"<p>{escape(each)}</p>" for each in step.notes)
    return (
        f"<h2>By the compiler</h2><p>{escape(step.compiler)}: {escape(step.depth)}</p>{notes}"
        f"{_table(('collective', 'along', 'number', 'size', 'seconds (modelled)'), collectives)}"
        f"{_table(('most expensive parts', 'seconds', 'share'), parts)}"
        f"{'' if step.peak is None else _peak(step.peak, step.depth)}"
    )


def _peak(peak: Peak, depth: str) -> str:
    """`depth`: what was compiled."""
    rows = (
        (each.origin, each.described, str(each.count), memory_text(each.num_bytes)) for each in peak.largest
    )
    title = f"in memory when most is ({depth}): {memory_text(peak.num_bytes)} of temporaries"
    return _table((title, "each", "number", "size"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f"<th>{escape(each)}</th>" for each in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(each)}</td>' for each in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table></div>'
