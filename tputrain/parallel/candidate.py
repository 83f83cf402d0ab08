"""Candidates of a plan: every way to run a task, and what the models of memory and time say of each."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any

from tputrain.errors import UserError
from tputrain.figures import memory_text
from tputrain.models.recompute import override
from tputrain.parallel.config import DEGREES
from tputrain.parallel.cost_model import MOVED, CostModel, Moved, Seconds
from tputrain.parallel.layout import Layout, layouts
from tputrain.parallel.memory_model import RUNGS, Memory, Precision, memory
from tputrain.parallel.topology import GIB, Topology
from tputrain.parallel.workload import Workload

if TYPE_CHECKING:
    from tputrain.parallel.variants import Variants

USABLE = 0.97
"""Of a device's memory. The rest is the runtime's, and the allocator's gaps."""
CODES = {
    "chosen": "the plan",
    "slower": "fits, and is slower, or shorter by less than context ranks must be worth",
    "memory": "does not fit into a device's memory",
    "batch": "the step's batch does not divide among the data ranks",
    "not_built": "fits, and the model cannot run it",
}
LEAST_GAIN_OF_CONTEXT = 0.1
"""Context ranks have to make a step shorter by as much: planned times are up to 12 % from the compiler's.
Llama 8B on 2x v5e:16x16 was planned 6 % shorter with them, and was 7 % longer by the compiler."""
ALIKE = 0.005  # plans whose steps differ by less are as fast; the simplest is taken


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
    built_rungs: tuple[str, ...] = RUNGS
    """Of those, the ones that the model can run."""
    degrees: Mapping[str, int] | None = None
    """Of the mesh, where they are given. None: they are chosen."""
    divides_layers: bool = True
    """Whether tensor and context degrees may be chosen."""
    usable: float = USABLE
    """Of a device's memory."""
    variants: "Variants | None" = field(default=None, compare=False, repr=False)
    """The same job with other settings, where it has a recipe."""

    def is_built(self, rung: str) -> bool:
        """Whether the model can run this kind of activation checkpointing, or these."""
        return set(rung.split(",")) <= set(self.built_rungs)

    @property
    def most(self) -> float:
        """Bytes of a device that may be used."""
        return self.topology.hbm * self.usable


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

    @property
    def weighed_seconds(self) -> float:
        """Of its step, made longer where context ranks must gain something. Candidates are compared by it."""
        gain = LEAST_GAIN_OF_CONTEXT if self.layout.degrees["context"] > 1 else 0.0
        return inf if self.seconds is None else self.seconds.total / (1 - gain)

    def settings(self, task: Task) -> str:
        """What a recipe sets for it, as overrides."""
        degrees = self.layout.degrees
        found = [f"parallel.{name}={degrees[name]}" for name in DEGREES if degrees[name] > 1]
        if (setting := override(self.rung)) is not None:
            found.append(setting)
        if task.micro_rows is None:
            found.append(f"batch.sequences={self.rows * degrees['replicate'] * degrees['shard']}")
        return " ".join(found)

    def moved(self, task: Task) -> Moved:
        """Predicted."""
        costs = CostModel(task.workload, task.topology, task.precision)
        rows = self.rows / self.layout.degrees["context"]
        return costs.moved(self.layout, rows, self.micro_batches, self.rung)

    def as_json(self, task: Task) -> dict[str, Any]:
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
            found["memory_gib"] = memory_as_json(self.memory)
        if self.seconds is not None:
            found["seconds"] = seconds_as_json(self.seconds)
            found["mfu"] = round(self.mfu, 4)
            found["moved_gib"] = moved_as_json(self.moved(task))
        return found


def candidates(task: Task, among: Iterable[Layout] | None = None) -> Iterator[Candidate]:
    """`among`: layouts of the task's topology, where not all of them are to be judged."""
    models = _Models(task)
    for layout in _layouts(task) if among is None else among:
        rows = task.micro_rows or task.rows
        if task.rows % layout.data_ranks or rows % layout.data_ranks:
            least = task.micro_rows and f" in micro-batches of {task.micro_rows}"
            reason = f"{task.rows} rows{least or ''} among {layout.data_ranks} data ranks"
            yield Candidate(layout, task.rungs[0], 0, 0, "batch", reason)
            continue
        for rung in task.rungs:
            yield models.with_most_rows(layout, rung)


def _layouts(task: Task) -> Iterator[Layout]:
    if (given := task.degrees) is None:
        context = task.workload.context_degrees if task.divides_layers else (1,)
        tensor = task.workload.tensor_degrees if task.divides_layers else (1,)
        yield from layouts(task.topology, tensor, context)
        return
    found = layouts(task.topology, (given["tensor"],), (given["context"],))
    alike = [layout for layout in found if layout.degrees == given]
    if not alike:
        asked = " ".join(f"parallel.{name}={degree}" for name, degree in given.items() if degree > 1)
        slices = task.topology.slices
        whole = f" (slices are replicas: replicate is a multiple of {slices})" if slices > 1 else ""
        raise UserError(
            f"{asked}: expected degrees that divide the axes of {task.topology.name}{whole}, "
            "or none of them: then the plan chooses"
        )
    yield from alike


def with_layers(task: Task, share_of: Callable[[str], float]) -> Task:
    """With so much of the layers of each name ("model.layers.*"), at least one of each kind."""
    *layers, rest = task.workload.parts
    fewer = [replace(each, count=max(1, round(share_of(each.name) * each.count))) for each in layers]
    return replace(task, workload=replace(task.workload, parts=(*fewer, rest)))


@dataclass(frozen=True)
class Modelled:
    """What the models say of a device, in a step."""

    memory: Memory
    flops_of_layers: float
    """Those that the model asks for."""
    flops_of_rest: float


def modelled(task: Task, candidate: Candidate, share_of: Callable[[str], float] = lambda _: 1.0) -> Modelled:
    """Of a candidate, with so much of the layers of each name."""
    task, rows, degrees = with_layers(task, share_of), candidate.rows, candidate.layout.degrees
    size = _memory(task, candidate.layout, candidate.rung, rows, is_accumulated=candidate.micro_batches > 1)
    rest = replace(task.workload, parts=task.workload.parts[-1:]).model_flops(rows)
    times = candidate.micro_batches / (degrees["tensor"] * degrees["context"])
    return Modelled(size, times * (task.workload.model_flops(rows) - rest), times * rest)


def _memory(task: Task, layout: Layout, rung: str, rows: int, is_accumulated: bool) -> Memory:
    context = layout.degrees["context"]
    return memory(
        task.workload,
        shards=layout.groups["shard"].size * context,
        tensor=layout.degrees["tensor"],
        context=context,
        rows=rows / context,
        rung=rung,
        is_accumulated=is_accumulated,
        precision=task.precision,
        has_logits_twice=task.topology.chip.has_logits_twice,
    )


class _Models:
    """Models of memory and time, for one task. Layouts of the same degrees need the same memory, which is
    worked out once.
    """

    def __init__(self, task: Task):
        self._task = task
        self._costs = CostModel(task.workload, task.topology, task.precision)
        self._sizes: dict[tuple[str, int, int, int], tuple[int, Memory]] = {}
        self._flops: dict[int, float] = {}

    def with_most_rows(self, layout: Layout, rung: str) -> Candidate:
        """With the largest micro-batch that fits: fewer of them gather parameters less often."""
        task, context = self._task, layout.degrees["context"]
        rows, found = self._most_rows(layout, rung)
        micro_batches = task.rows // layout.data_ranks // rows
        if found.total > task.most:
            reason = f"{memory_text(found.total)} of {memory_text(task.most)}"
            return Candidate(layout, rung, rows, micro_batches, "memory", reason, found)
        if found.host > task.topology.host_memory:
            limit = memory_text(task.topology.host_memory)
            reason = f"in the host's memory {memory_text(found.host)} of {limit}"
            return Candidate(layout, rung, rows, micro_batches, "memory", reason, found)
        seconds = self._costs.seconds(layout, rows / context, micro_batches, rung)
        flops = layout.data_ranks * micro_batches * self._model_flops(rows)  # no rank sees the rows of others
        mfu = flops / (seconds.total * task.topology.num_devices * task.topology.peak_flops)
        code, reason = "slower", ""
        if not task.is_built(rung):
            code, reason = "not_built", f"activation checkpointing of the kind {rung}"
        return Candidate(layout, rung, rows, micro_batches, code, reason, found, seconds, mfu)

    def _most_rows(self, layout: Layout, rung: str) -> tuple[int, Memory]:
        """The largest micro-batch of a data rank that fits, else the smallest, and its memory."""
        task, degrees = self._task, layout.degrees
        key = rung, degrees["shard"], degrees["context"], degrees["tensor"]
        if key not in self._sizes:
            all_rows = task.rows // layout.data_ranks
            if task.micro_rows is None:
                choices = [rows for rows in range(all_rows, 0, -1) if all_rows % rows == 0]
            else:
                choices = [task.micro_rows // layout.data_ranks]
            for rows in choices:
                found = _memory(task, layout, rung, rows, is_accumulated=rows != all_rows)
                if found.total <= task.most and found.host <= task.topology.host_memory:
                    break
            self._sizes[key] = rows, found
        return self._sizes[key]

    def _model_flops(self, rows: int) -> float:
        if rows not in self._flops:
            self._flops[rows] = self._task.workload.model_flops(rows)
        return self._flops[rows]


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The fastest. Of those as fast: one without the host's memory, then the simplest, then the smallest."""
    judged = [
        (each, each.memory, each.weighed_seconds)
        for each in candidates
        if each.memory is not None and each.seconds is not None
    ]
    fastest = min((seconds for _, _, seconds in judged), default=0.0)

    def order(found: tuple[Candidate, Memory, float]) -> tuple[Any, ...]:
        candidate, size, seconds = found
        return (
            bool(size.host),
            candidate.layout.num_axes_used,
            max(map(RUNGS.index, candidate.rung.split(","))),
            candidate.micro_batches,
            round(seconds / fastest, 4),
            size.total,
        )

    alike = [each for each in judged if each[2] <= fastest * (1 + ALIKE)]
    return min(alike, key=order)[0] if alike else None


# -- as plain values ---------------------------------------------------------------------------------------


def memory_as_json(found: Memory) -> dict[str, Any]:
    sizes = "total arguments temporaries parameters optimizer gradients kept working gathered padding host"
    return {name: _rounded(getattr(found, name)) for name in sizes.split()} | {"moment": found.moment}


def _rounded(num_bytes: float) -> float:
    return round(num_bytes / GIB, 3)


def moved_as_json(found: Moved) -> dict[str, float]:
    """Bytes that a device takes in from others, in GiB, of each kind that there is."""
    return {name: round(getattr(found, name) / GIB, 4) for name, _ in MOVED if getattr(found, name)}


def seconds_as_json(found: Seconds) -> dict[str, Any]:
    parts = {name: float(f"{value:.4g}") for name, value in vars(found).items()}
    return {"total": float(f"{found.total:.4g}"), **parts, "bound": found.bound}
