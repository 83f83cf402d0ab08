"""Chooses how a model is laid out on a topology: degrees, torus axes, activation checkpointing, micro-batch.

All candidates are enumerated and judged by two models, of memory and of time. Each has a code that says what
became of it. The chosen one is the fastest that fits and that the Trainer can run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from tputrain.errors import UserError
from tputrain.parallel.config import DEGREES
from tputrain.parallel.cost_model import CostModel, Seconds
from tputrain.parallel.layout import Layout, layouts
from tputrain.parallel.memory_model import RUNGS, Memory, Precision, memory
from tputrain.parallel.topology import GIB, Topology, shapes
from tputrain.parallel.workload import Workload

USABLE = 0.97
"""Of a device's memory. The rest is the runtime's, and the allocator's gaps."""
CODES = {
    "chosen": "the plan",
    "slower": "fits, and is slower",
    "memory": "does not fit into a device's memory",
    "batch": "the step's batch does not divide among the data ranks",
    "not_built": "fits, and is not chosen yet: the Trainer cannot run it, or its time was never checked",
}
_BUILT_RUNGS = ("none", "layers")
_CONTEXT_DEGREES = (1, 2, 4, 8, 16)
_ALIKE = 0.005  # plans whose steps differ by less are as fast; the simplest is taken
_WORTH_SAYING = 0.03


@dataclass(frozen=True)
class Task:
    """What is to be planned."""

    workload: Workload
    topology: Topology
    rows: int
    """Rows of the batch in a step, on all devices."""
    micro_rows: int | None = None
    """Rows of a micro-batch on all devices, where that is not to be chosen."""
    precision: Precision = field(default_factory=Precision)
    rungs: tuple[str, ...] = RUNGS
    """Of activation checkpointing, those that may be chosen."""
    built_rungs: tuple[str, ...] = _BUILT_RUNGS
    """Of those, the ones that the model and the Trainer can run."""


@dataclass(frozen=True)
class Candidate:
    """One way to run the task, and what the models say of it."""

    layout: Layout
    rung: str
    rows: int
    """Of a micro-batch, of each data rank (context ranks share them)."""
    micro_batches: int
    code: str
    reason: str
    memory: Memory | None = None
    seconds: Seconds | None = None
    mfu: float = 0.0

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "degrees": self.layout.degrees,
            "axes": {name: self.layout.describe(name) for name in DEGREES if self.layout.degrees[name] > 1},
            "activation_checkpointing": self.rung,
            "rows": self.rows,
            "micro_batches": self.micro_batches,
            "code": self.code,
            "reason": self.reason,
        }
        if self.memory is not None:
            found["memory_gib"] = _memory_as_json(self.memory)
        if self.seconds is not None:
            found["seconds"] = _seconds_as_json(self.seconds)
            found["mfu"] = round(self.mfu, 4)
        return found


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, if any fits, and all others."""

    task: Task
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    changes: tuple[str, ...]
    """What would make it fit, or make it faster."""

    @cached_property
    def why(self) -> list[str]:
        """Reasons for the choice, a sentence each."""
        return [] if self.chosen is None else list(_reasons(self, self.chosen))

    def refusal(self) -> str:
        """Why there is no plan, and the smallest change that would make one."""
        task = self.task
        least = min(
            (each for each in self.candidates if each.memory is not None and each.code == "memory"),
            key=lambda each: each.memory.total,  # type: ignore[union-attr]
            default=None,
        )
        what = f"{task.workload.name} on {task.topology.name}"
        change = f"; what would: {self.changes[0]}" if self.changes else ""
        if least is None or least.memory is None:
            return f"{what}: {task.rows} sequences a step do not divide among its devices{change}"
        return (
            f"{what}: does not fit: at best {least.memory.total / GIB:.1f} GiB of "
            f"{task.topology.hbm * USABLE / GIB:.1f} GiB a device{change}"
        )

    def as_json(self, num_candidates: int | None = None) -> dict[str, Any]:
        """All of it as plain values. `num_candidates`: only so many of the candidates, the best ones."""
        task, topology = self.task, self.task.topology
        counts = dict.fromkeys(CODES, 0)
        for each in self.candidates:
            counts[each.code] += 1
        ranked = sorted(self.candidates, key=_rank)
        return {
            "model": task.workload.name,
            "parameters": task.workload.num_parameters,
            "topology": topology.name,
            "chips": topology.num_chips,
            "devices": topology.num_devices,
            "hosts": topology.num_hosts,
            "hbm_gib": round(topology.hbm / GIB, 2),
            "rows": task.rows,
            "sequence": task.workload.sequence,
            "fits": self.chosen is not None,
            "chosen": None if self.chosen is None else self.chosen.as_json(),
            "why": self.why,
            "changes": list(self.changes),
            "refusal": None if self.chosen is not None else self.refusal(),
            "mfu_rule": MFU_RULE,
            "codes": CODES,
            "counts": counts,
            "candidates": [each.as_json() for each in ranked[:num_candidates]],
        }


MFU_RULE = (
    "FLOPs of all matrix products, forward and backward, attention in full and nothing computed again, "
    "over step seconds x devices x peak bfloat16 FLOP/s"
)


def make_plan(task: Task) -> Plan:
    """The best plan, or one without a choice where none fits."""
    found = tuple(_candidates(task))
    chosen = _best([each for each in found if each.code == "slower"])
    if chosen is None:
        return Plan(task, found, None, tuple(_what_would_fit(task, found)))
    final = replace(chosen, code="chosen", reason="")
    found = tuple(final if each is chosen else _compared(each, chosen) for each in found)
    return Plan(task, found, final, tuple(_what_would_be_faster(found, final)))


def _candidates(task: Task) -> Iterator[Candidate]:
    costs = CostModel(task.workload, task.topology, task.precision)
    context = _CONTEXT_DEGREES if task.workload.sequence else (1,)
    for layout in layouts(task.topology, task.workload.tensor_degrees, context):
        data_ranks = layout.degrees["replicate"] * layout.degrees["shard"]
        rows = task.micro_rows or task.rows
        if task.rows % data_ranks or rows % data_ranks:
            least = task.micro_rows and f" in micro-batches of {task.micro_rows}"
            reason = f"{task.rows} rows{least or ''} among {data_ranks} data ranks"
            yield Candidate(layout, task.rungs[0], 0, 0, "batch", reason)
            continue
        for rung in task.rungs:
            yield _with_most_rows(task, costs, layout, rung, data_ranks)


def _with_most_rows(task: Task, costs: CostModel, layout: Layout, rung: str, data_ranks: int) -> Candidate:
    """With the largest micro-batch that fits: fewer of them gather parameters less often."""
    all_rows = task.rows // data_ranks
    if task.micro_rows is None:
        choices = [rows for rows in range(all_rows, 0, -1) if all_rows % rows == 0]
    else:
        choices = [task.micro_rows // data_ranks]
    context, most = layout.degrees["context"], task.topology.hbm * USABLE
    for rows in choices:
        found = memory(
            task.workload,
            shards=layout.groups["shard"].size * context,
            tensor=layout.degrees["tensor"],
            rows=rows / context,
            rung=rung,
            is_accumulated=rows != all_rows,
            precision=task.precision,
        )
        if found.total <= most and found.host <= task.topology.host_memory:
            break
    micro_batches = all_rows // rows
    if found.total > most:
        reason = f"{found.total / GIB:.1f} of {most / GIB:.1f} GiB"
        return Candidate(layout, rung, rows, micro_batches, "memory", reason, found)
    if found.host > task.topology.host_memory:
        reason = f"{found.host / GIB:.0f} of {task.topology.host_memory / GIB:.0f} GiB of the host's memory"
        return Candidate(layout, rung, rows, micro_batches, "memory", reason, found)
    seconds = costs.seconds(layout, rows / context, micro_batches, rung)
    flops = task.workload.model_flops(task.rows)
    mfu = flops / (seconds.total * task.topology.num_devices * task.topology.peak_flops)
    missing = []
    if rung not in task.built_rungs:
        missing.append(f"activation checkpointing of the kind {rung}")
    if context > 1:
        missing.append(f"parallel.context={context}")
    code = "not_built" if missing else "slower"
    return Candidate(layout, rung, rows, micro_batches, code, " and ".join(missing), found, seconds, mfu)


def _best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest; of those as fast the simplest, and of those the smallest."""
    if not candidates:
        return None
    fastest = min(each.seconds.total for each in candidates)  # type: ignore[union-attr]
    alike = [each for each in candidates if each.seconds.total <= fastest * (1 + _ALIKE)]  # type: ignore[union-attr]
    return min(
        alike,
        key=lambda each: (
            each.layout.num_axes_used,
            RUNGS.index(each.rung),
            each.micro_batches,
            round(each.seconds.total / fastest, 4),  # type: ignore[union-attr]
            each.memory.total,  # type: ignore[union-attr]
        ),
    )


def _compared(candidate: Candidate, chosen: Candidate) -> Candidate:
    """With the reason why it was not taken, where there was none."""
    if candidate.code != "slower" or candidate.seconds is None or chosen.seconds is None:
        return candidate
    times = candidate.seconds.total / chosen.seconds.total
    return replace(candidate, reason=f"{times:.2f} times the chosen step")


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    order = ("chosen", "slower", "not_built", "memory", "batch")
    seconds = candidate.seconds.total if candidate.seconds else 0.0
    most = candidate.memory.total if candidate.memory else 0.0
    return order.index(candidate.code), seconds, most, tuple(candidate.layout.degrees.values())


# -- reasons and changes -----------------------------------------------------------------------------------


def _reasons(plan: Plan, chosen: Candidate) -> Iterator[str]:
    assert chosen.memory is not None
    assert chosen.seconds is not None
    task, degrees = plan.task, chosen.layout.degrees
    whole = sum(
        part.count * (part.parameters.whole + part.parameters.cut) for part in task.workload.parts
    ) * (task.workload.parts[-1].parameters.itemsize + task.precision.optimizer)
    held = chosen.memory.parameters + chosen.memory.optimizer
    if degrees["shard"] > 1:
        yield (
            f"shard {degrees['shard']}: parameters and optimizer state take {_gib(held)} a device; "
            f"undivided they are {_gib(whole)}"
        )
    yield from _against(plan, chosen, "shard", "replicas instead of shards", lambda each: each["replicate"])
    yield from _against(plan, chosen, "tensor", "tensor parallelism", lambda each: each["tensor"])
    if degrees["replicate"] > 1:
        inside = degrees["replicate"] // task.topology.slices
        if task.topology.slices > 1:
            yield "slices are replicas: between them only gradients go, once a step"
        if inside > 1:
            yield f"{inside} replicas in a slice: parameters are gathered over fewer chips"
    if chosen.rung != "none":
        plain = [
            each
            for each in plan.candidates
            if each.rung == "none" and each.layout == chosen.layout and each.memory is not None
        ]
        if plain and plain[0].memory is not None:
            most = f"{_gib(plain[0].memory.total)} with {_rows(plain[0].rows)} a device"
            yield f"activation checkpointing ({chosen.rung}): without it, {most}"
    if chosen.micro_batches > 1:
        yield f"{chosen.micro_batches} micro-batches: more rows at a time do not fit"


def _against(plan: Plan, chosen: Candidate, axis: str, what: str, degree: Any) -> Iterator[str]:
    """What the best plan that does otherwise would cost."""
    assert chosen.seconds is not None
    own = degree(chosen.layout.degrees)
    others = [
        each
        for each in plan.candidates
        if each.code == "slower" and each.seconds and (degree(each.layout.degrees) > 1) != (own > 1)
    ]
    best = min(others, key=lambda each: each.seconds.total, default=None)  # type: ignore[union-attr]
    if best is None or best.seconds is None:
        return
    slower = best.seconds.total / chosen.seconds.total - 1
    if slower < _ALIKE:
        return
    word = "without" if own > 1 else "with"
    yield f"{word} {what} the step would take {slower:.0%} longer"


def _what_would_be_faster(candidates: Sequence[Candidate], chosen: Candidate) -> Iterator[str]:
    assert chosen.seconds is not None
    unbuilt = [each for each in candidates if each.code == "not_built"]
    best = min(unbuilt, key=lambda each: each.seconds.total, default=None)  # type: ignore[union-attr]
    if best is not None and best.seconds is not None:
        gain = 1 - best.seconds.total / chosen.seconds.total
        if gain > _WORTH_SAYING:
            yield f"{best.reason} would make the step {gain:.0%} shorter; no plan has that yet"


def _what_would_fit(task: Task, candidates: Sequence[Candidate]) -> Iterator[str]:
    """The smallest change first."""
    undivided = [each for each in candidates if each.code == "batch"]
    if undivided and all(each.code in ("batch", "not_built") for each in candidates):
        degrees = [each.layout.degrees for each in undivided if each.layout.degrees["context"] == 1]
        data_ranks = min(each["replicate"] * each["shard"] for each in degrees)
        rows = -(-task.rows // data_ranks) * data_ranks
        yield f"a multiple of {data_ranks} sequences a step (batch.tokens), such as {rows}"
        return
    if task.rungs != RUNGS and "layers" not in task.rungs:
        wider = make_plan(replace(task, rungs=("none", "layers")))
        if wider.chosen is not None:
            yield "model.activation_checkpointing=true"
            return
    if task.micro_rows is not None:
        for divisor in (2, 4, 8, 16, 32):
            if task.micro_rows % divisor == 0:
                smaller = make_plan(replace(task, micro_rows=task.micro_rows // divisor))
                if smaller.chosen is not None:
                    yield f"batch.sequences={task.micro_rows // divisor} in place of {task.micro_rows}"
                    return
    larger = _smallest_larger_slice(task)
    if larger is not None:
        yield f"a larger slice: {larger.name}"
    best = _best([each for each in candidates if each.code == "not_built"])
    if best is not None:
        yield f"{best.reason}, which no plan has yet"


def _smallest_larger_slice(task: Task) -> Topology | None:
    topology = task.topology
    size = prod(topology.shape)
    larger = [shape for shape in shapes(topology.chip) if prod(shape) > size]
    for shape in larger:
        other = replace(topology, shape=shape)
        # Twice the size at least: every one of hundreds of cubes would be looked at.
        if other.num_chips % topology.num_chips or (other.num_chips // topology.num_chips).bit_count() > 1:
            continue
        found = tuple(_candidates(replace(task, topology=other)))
        if any(each.code == "slower" for each in found):
            return other
    return None


# -- as plain values ---------------------------------------------------------------------------------------


def _memory_as_json(found: Memory) -> dict[str, Any]:
    return {
        "total": _rounded(found.total),
        "arguments": _rounded(found.arguments),
        "temporaries": _rounded(found.temporaries),
        "parameters": _rounded(found.parameters),
        "optimizer": _rounded(found.optimizer),
        "gradients": _rounded(found.gradients),
        "kept": _rounded(found.kept),
        "working": _rounded(found.working),
        "gathered": _rounded(found.gathered),
        "host": _rounded(found.host),
        "moment": found.moment,
    }


def _rounded(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def _seconds_as_json(found: Seconds) -> dict[str, Any]:
    parts = {name: float(f"{value:.4g}") for name, value in vars(found).items()}
    return {"total": float(f"{found.total:.4g}"), **parts, "bound": found.bound}


def _gib(num_bytes: float) -> str:
    size = num_bytes / GIB
    return f"{size:,.0f} GiB" if size >= 100 else f"{size:.2f} GiB" if size < 10 else f"{size:.1f} GiB"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def refuse(plan: Plan) -> None:
    """Raise UserError, one line, where nothing fits."""
    if plan.chosen is None:
        raise UserError(plan.refusal())
