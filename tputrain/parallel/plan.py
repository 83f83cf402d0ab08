"""Chooses how a model is laid out on a topology: degrees, torus axes, activation checkpointing, micro-batch.

All candidates are enumerated and judged by two models, of memory and of time. Each has a code that says what
became of it. The chosen one is the fastest that fits and that the Trainer can run.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tputrain.errors import UserError
from tputrain.figures import memory_text
from tputrain.parallel.advice import advice
from tputrain.parallel.candidate import ALIKE, CODES, Candidate, Task, best, candidates
from tputrain.parallel.changes import (
    is_tight,
    unbuilt_that_fits,
    what_would_be_faster,
    what_would_fit,
)
from tputrain.parallel.topology import GIB


@dataclass(frozen=True)
class Plan:
    """The chosen candidate, if any fits, and all others."""

    task: Task
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None

    @cached_property
    def changes(self) -> list[str]:
        """What would make it fit, or make it faster. Other settings are planned for it, so it takes time."""
        if self.chosen is None:
            return list(what_would_fit(self.task, self.candidates))
        return [*what_would_be_faster(self.task, self.candidates, self.chosen), *advice(self)]

    @cached_property
    def why(self) -> list[str]:
        """Reasons for the choice, a sentence each."""
        return [] if self.chosen is None else list(_reasons(self, self.chosen))

    @property
    def unit(self) -> str:
        """What a step has so many of."""
        return "tokens" if self.task.workload.sequence else "rows"

    def speed(self, seconds: float) -> float:
        """Tokens or rows a second and chip, where a step takes so long."""
        task = self.task
        return task.rows * (task.workload.sequence or 1) / seconds / task.topology.num_chips

    def mfu(self, seconds: float) -> float:
        """Of the chosen plan, where its step takes so long."""
        assert self.chosen is not None
        assert self.chosen.seconds is not None
        return self.chosen.mfu * self.chosen.seconds.total / seconds

    @cached_property
    def notes(self) -> list[str]:
        """What to know of the figures, and of layouts that are not chosen by themselves."""
        return list(_notes(self))

    def refusal(self) -> str:
        """Why there is no plan, and the smallest change that would make one."""
        task = self.task
        least = min(
            (each for each in self.candidates if each.code == "memory" and task.is_built(each.rung)),
            key=lambda each: _share_needed(task, each),
            default=None,
        )
        what = f"{task.workload.name} on {task.topology.name}"
        change = "".join(f"; {each}" for each in self.notes)
        change += f"; what would fit: {self.changes[0]}" if self.changes else ""
        if least is None or least.memory is None:
            rows = "sequences" if task.workload.sequence else "rows"
            return f"{what}: {task.rows} {rows} a step do not divide among its devices{change}"
        used, most, where = least.memory.total, task.most, ""
        if used <= most:  # what is offloaded is too much
            used, most, where = least.memory.host, task.topology.host_memory, " in the host's memory"
        needed = f"the layout that needs least takes {memory_text(used)} a device{where}"
        return f"{what}: does not fit: {needed}, which has {memory_text(most)}{change}"

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
            "usable_gib": round(task.most / GIB, 2),
            "rows": task.rows,
            "sequence": task.workload.sequence,
            "fits": self.chosen is not None,
            "chosen": None if self.chosen is None else self._as_json(self.chosen),
            "why": self.why,
            "changes": self.changes,
            "notes": self.notes,
            "refusal": None if self.chosen is not None else self.refusal(),
            "mfu_rule": MFU_RULE,
            "codes": CODES,
            "counts": counts,
            "candidates": [each.as_json(task) for each in ranked[:num_candidates]],
        }

    def _as_json(self, chosen: Candidate) -> dict[str, Any]:
        assert chosen.seconds is not None
        speed = {f"{self.unit}_per_second_and_chip": round(self.speed(chosen.seconds.total), 1)}
        return chosen.as_json(self.task) | speed | {"settings": chosen.settings(self.task)}


MFU_RULE = (
    "FLOPs of all matrix products, forward and backward, attention in full and nothing computed again, "
    "over step seconds x devices x peak bfloat16 FLOP/s"
)


def make_plan(task: Task) -> Plan:
    """The best plan, or one without a choice where none fits."""
    found = tuple(candidates(task))
    chosen = best([each for each in found if each.code == "slower"])
    if chosen is None:
        return Plan(task, found, None)
    final = replace(chosen, code="chosen", reason="")
    found = tuple(final if each is chosen else _compared(each, chosen) for each in found)
    return Plan(task, found, final)


def _compared(candidate: Candidate, chosen: Candidate) -> Candidate:
    """With the reason why it was not taken, where there was none."""
    if candidate.code != "slower" or candidate.seconds is None or chosen.seconds is None:
        return candidate
    times = candidate.seconds.total / chosen.seconds.total
    doubt = ", which is within the planner's error" if times < 1 else ""
    return replace(candidate, reason=f"{times:.2f} times the chosen step{doubt}")


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    order = ("chosen", "slower", "not_built", "memory", "batch")
    seconds = candidate.seconds.total if candidate.seconds else 0.0
    most = candidate.memory.total if candidate.memory else 0.0
    return order.index(candidate.code), seconds, most, tuple(candidate.layout.degrees.values())


# -- reasons and notes -------------------------------------------------------------------------------------


def _reasons(plan: Plan, chosen: Candidate) -> Iterator[str]:
    assert chosen.memory is not None
    assert chosen.seconds is not None
    task, degrees = plan.task, chosen.layout.degrees
    whole = sum(
        part.count * (part.parameters.whole + part.parameters.cut) for part in task.workload.parts
    ) * (task.workload.parts[-1].parameters.itemsize + task.precision.optimizer)
    held = chosen.memory.parameters + chosen.memory.optimizer
    if degrees["shard"] * degrees["context"] > 1:
        ranks = f"shard {degrees['shard']}" + f" x context {degrees['context']}" * (degrees["context"] > 1)
        yield (
            f"{ranks}: parameters and optimizer state take {memory_text(held)} a device; "
            f"undivided they are {memory_text(whole)}"
        )
    yield from _against(plan, chosen, "replicas", lambda each: each["replicate"])
    yield from _against(plan, chosen, "tensor parallelism", lambda each: each["tensor"])
    if degrees["context"] > 1:
        yield from _against(plan, chosen, "context parallelism", lambda each: each["context"])
    if degrees["replicate"] > 1:
        inside = degrees["replicate"] // task.topology.slices
        if task.topology.slices > 1:
            yield "slices are replicas: between them only gradients go, once a step"
        if inside > 1 and degrees["shard"] * degrees["context"] > 1:
            yield f"{inside} replicas in a slice: parameters are gathered over fewer chips"
        elif inside > 1:
            yield f"{inside} replicas in a slice, each with all parameters: no layer is gathered"
    if chosen.rung != "none":
        plain = [
            each
            for each in plan.candidates
            if each.rung == "none" and each.layout == chosen.layout and each.memory is not None
        ]
        if plain and plain[0].memory is not None:
            most = f"{memory_text(plain[0].memory.total)} with {_rows(plain[0].rows)} a device"
            yield f"activation checkpointing ({chosen.rung}): without it, {most}"
    if chosen.micro_batches > 1 and task.micro_rows is None:
        yield f"{chosen.micro_batches} micro-batches: more rows at a time do not fit"


def _share_needed(task: Task, candidate: Candidate) -> float:
    """Of the memory, a device's or the host's."""
    assert candidate.memory is not None
    return max(candidate.memory.total / task.most, candidate.memory.host / task.topology.host_memory)


def _notes(plan: Plan) -> Iterator[str]:
    task, chosen = plan.task, plan.chosen
    if chosen is None or chosen.memory is None or chosen.seconds is None:
        if (unbuilt := unbuilt_that_fits(plan.candidates)) is not None:
            yield f"with {unbuilt.reason} it would fit, but the model cannot do it"
        return
    if is_tight(task, chosen):
        size = f"{memory_text(chosen.memory.total)} of {memory_text(task.most)} a device"
        yield f"tight: {size}, and the compiler may need some percent more; --compile says whether it fits"
    if task.topology.chip.is_stand_in:
        yield "step and memory are modelled for a stand-in chip: no CPU was measured"
    elif task.workload.num_parameters < _SMALL_MODEL or chosen.seconds.total < _SMALL_STEP:
        yield (
            "so small a step was not compared with the compiler: time and memory may be off by half; "
            "--compile asks it"
        )
    fitting = [each for each in plan.candidates if each.code == "slower" and each.seconds]
    fastest = min(fitting, key=lambda each: each.seconds.total, default=chosen)  # type: ignore[union-attr]
    assert fastest.seconds is not None
    if (gain := 1 - fastest.seconds.total / chosen.seconds.total) > _WORTH_SAYING:
        yield (
            f"{fastest.settings(task)} might make the step {gain:.0%} shorter, which is within the planner's "
            "error; tputrain plan --search asks the compiler"
        )
    unbuilt = min(
        (each for each in plan.candidates if each.code == "not_built"),
        key=lambda each: each.seconds.total,  # type: ignore[union-attr]
        default=None,
    )
    if unbuilt is not None and unbuilt.seconds is not None:
        gain = 1 - unbuilt.seconds.total / chosen.seconds.total
        if gain > _WORTH_SAYING:
            yield f"{unbuilt.reason} might make the step {gain:.0%} shorter, but the model cannot do it"


_SMALL_MODEL, _SMALL_STEP = 100e6, 0.01  # parameters, seconds; plans were compared from 1B on
_WORTH_SAYING = 0.03


def _against(plan: Plan, chosen: Candidate, what: str, degree: Any) -> Iterator[str]:
    """What the best plan that does otherwise would cost."""
    assert chosen.seconds is not None
    own = degree(chosen.layout.degrees)
    others = [
        each
        for each in plan.candidates
        if each.code == "slower" and each.seconds and (degree(each.layout.degrees) > 1) != (own > 1)
    ]
    other = min(others, key=lambda each: each.seconds.total, default=None)  # type: ignore[union-attr]
    if other is None or other.seconds is None:
        return
    slower = other.seconds.total / chosen.seconds.total - 1
    if slower < ALIKE:
        return
    word = "without" if own > 1 else "with"
    yield f"{word} {what} the step would take {slower:.0%} longer"


def _rows(count: int) -> str:
    return f"{count} row{'' if count == 1 else 's'}"


def refuse(plan: Plan) -> None:
    """Raise UserError, one line, where nothing fits."""
    if plan.chosen is None:
        raise UserError(plan.refusal())
