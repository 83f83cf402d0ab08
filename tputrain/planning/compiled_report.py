"""What the TPU compiler says of a plan, for people."""

from collections.abc import Iterator
from typing import Any

from tputrain.figures import memory_text, percent, seconds_text
from tputrain.parallel.plan import Plan
from tputrain.planning.compiled_step import BAND, SECONDS_OF_STEP, SHOWN, CompiledStep
from tputrain.planning.peak import Peak


def compiled_lines(plan: Plan, step: CompiledStep) -> Iterator[str]:
    """Beside the lines of the plan (`plan_report.lines`)."""
    task, chosen = plan.task, plan.chosen
    assert chosen is not None
    assert chosen.memory is not None
    assert chosen.seconds is not None
    topology = task.topology
    most, total = task.most, step.memory
    fits = "" if total <= most else ": DOES NOT FIT"
    yield ""
    yield (
        f"compiled by {step.compiler} for {topology.name} in {step.compile_seconds:.0f} s "
        f"(recorded in {step.record_seconds:.0f} s): {step.depth}"
    )
    yield (
        f"memory  {memory_text(total)} of {memory_text(most)} a device{fits}: arguments "
        f"{memory_text(step.arguments)}, temporaries {memory_text(step.temporaries)} "
        f"(the plan's model: {memory_text(chosen.memory.total)})"
    )
    if step.host:
        yield f"        in the host's memory {memory_text(step.host)} a device"
    seconds = step.seconds
    yield (
        f"step    {seconds_text(seconds)} +-{BAND:.0%}, MFU {percent(plan.mfu(seconds))}, "
        f"{plan.speed(seconds):,.0f} {plan.unit}/s a chip "
        f"(the plan's model: {seconds_text(chosen.seconds.total)})"
    )
    shares = [(what, getattr(step, name) / seconds) for name, what in SECONDS_OF_STEP]
    yield "        " + ", ".join(f"{what} {share:.0%}" for what, share in shares if share >= SHOWN)
    yield f"        {step.flops / 1e12:,.2f} TFLOP a device by the compiler's count"
    for number, each in enumerate(step.collectives):
        yield (
            f"{'moves' if number == 0 else '':7} {each.kind} along {each.axes}: {round(each.count)}, "
            f"{memory_text(each.num_bytes)}, {seconds_text(each.seconds)} (modelled)"
        )
    for number, (what, value) in enumerate(step.all_parts):
        yield f"{'parts' if number == 0 else '':7} {value / seconds:4.0%} {seconds_text(value)}  {what}"
    if step.peak is not None:
        yield from _peak_lines(step.peak, step.depth)
    for note in step.notes:
        yield f"note    {note}"


def compiled_as_json(plan: Plan, step: CompiledStep) -> dict[str, Any]:
    """All of it as plain values; sizes in bytes."""
    speed = {f"{plan.unit}_per_second_and_chip": round(plan.speed(step.seconds), 1)}
    return step.as_json() | {"mfu": round(plan.mfu(step.seconds), 4)} | speed


def _peak_lines(peak: Peak, depth: str) -> Iterator[str]:
    """`depth`: what was compiled."""
    where = f" in {peak.label}" if peak.label else ""
    yield f"peak    {memory_text(peak.num_bytes)} of temporaries at a time{where}, for {depth}; among them:"
    for each in peak.largest:
        yield f"        {each.amount}  {each.origin}"
