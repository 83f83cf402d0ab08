"""What the TPU compiler says of a plan, for people."""

from collections.abc import Iterator

from tputrain.parallel.plan import Plan
from tputrain.parallel.topology import GIB
from tputrain.planning.compiled_step import BAND, CompiledStep
from tputrain.planning.peak import Peak

_SHOWN = 0.005  # of the step


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
        f"memory  {total / GIB:.2f} of {most / GIB:.2f} GiB a device{fits}: arguments "
        f"{step.arguments / GIB:.2f}, temporaries {step.temporaries / GIB:.2f} "
        f"(the plan's model: {chosen.memory.total / GIB:.2f})"
    )
    if step.host:
        yield f"        in the host's memory {step.host / GIB:.2f} GiB a device"
    seconds = step.seconds
    mfu = chosen.mfu * chosen.seconds.total / seconds
    speed = task.rows * (task.workload.sequence or 1) / seconds / topology.num_chips
    unit = "tokens" if task.workload.sequence else "rows"
    yield (
        f"step    {said(seconds)} +-{BAND:.0%}, MFU {mfu:.1%}, {speed:,.0f} {unit}/s a chip "
        f"(the plan's model: {said(chosen.seconds.total)})"
    )
    shares = {
        "by the compiler's cycles": step.estimated,
        "waiting for collectives (modelled)": step.waiting,
        "copies within the memory (modelled)": step.copying,
        "without an estimate (modelled)": step.unestimated,
    }
    yield "        " + ", ".join(
        f"{what} {value / seconds:.0%}" for what, value in shares.items() if value / seconds >= _SHOWN
    )
    yield f"        {step.flops / 1e12:,.2f} TFLOP a device by the compiler's count"
    for number, each in enumerate(step.collectives):
        yield (
            f"{'moves' if number == 0 else '':7} {each.kind} along {each.axes}: {round(each.count)}, "
            f"{_sized(each.num_bytes)}, {said(each.seconds)} (modelled)"
        )
    for number, (what, value) in enumerate(step.parts):
        yield f"{'parts' if number == 0 else '':7} {value / seconds:4.0%} {said(value)}  {what}"
    if step.peak is not None:
        yield from _peak_lines(step.peak, step.depth)
    for note in step.notes:
        yield f"note    {note}"


def _peak_lines(peak: Peak, depth: str) -> Iterator[str]:
    """`depth`: what was compiled."""
    where = f" in {peak.label}" if peak.label else ""
    yield f"peak    {peak.num_bytes / GIB:.2f} GiB of temporaries at a time{where} ({depth}), among them:"
    for each in peak.largest:
        yield f"        {each.sized}  {each.said}"


def _sized(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= 0.1 * GIB else f"{num_bytes / 2**20:.1f} MiB"


def said(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
