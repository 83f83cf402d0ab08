"""What the TPU compiler says of a plan: its step is recorded and compiled for the slice, which is not here.

Compile time must not grow with depth. Layers that are alike are compiled twice, with few of them and with a
few more; every figure goes on from there on a straight line, to the depth of the model. What is done once a
micro-batch is compiled for two at most, and counted as often as it is done. Temporaries do not grow on such
a line: the peak can move to another place in the step, and gaps between buffers vary. They grow as the
planner's model says.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn

from tputrain import device as devices
from tputrain.announce import announced
from tputrain.batches import Batch
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.loss import LossFunction
from tputrain.parallel.blocks import lists_of_blocks, period
from tputrain.parallel.layout import INNERMOST_FIRST, Group, Layout, Stretch, mesh_of
from tputrain.parallel.step_schedule import Schedule, schedule
from tputrain.parallel.topology import GIB, Topology
from tputrain.planning.abstract_step import ONCE, abstract_step
from tputrain.planning.peak import Peak
from tputrain.planning.peak import peak as peak_of

FEW, MORE = 4, 8
"""Layers of the two compilations. Fewer than four hide what overlaps between layers; the step of a model with
so many layers costs the compiler not much more than one with two."""
BAND = 0.15
"""Of predicted seconds: what a predictor of this kind came to on public steps. Not measured for this one."""
# libtpu says it in two ways. Both numbers are of arguments and temporaries together.
_OUT_OF_MEMORY = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEAST_OF_PEAK = 0.5  # of the temporaries
BETWEEN_SLICES = "replicate, between slices"
"""Only replicas go over the network between slices."""

Figures = defaultdict[tuple[str, ...], float]
"""Numbers by kind and name, all of which are on a straight line over the depth."""


@dataclass(frozen=True)
class Subject:
    """What is compiled: a way to make the model anew, and how the Trainer runs it."""

    make_model: Callable[[], nn.Module]
    """Parameters best on meta."""
    cfg: RunConfig
    """With the degrees of `layout`."""
    batch: Batch
    """A micro-batch of all ranks."""
    layout: Layout
    loss_fn: LossFunction | None = None
    temporaries_of: Callable[[float], float] | None = None
    """Bytes by a model, for so much of the layers (all lists together). None: on the line, too."""


@dataclass(frozen=True)
class CompiledStep:
    """Of one device. Bytes and seconds of a step."""

    arguments: float
    temporaries: float
    estimated: float
    """Seconds by the compiler's estimated cycles; the other seconds are modelled."""
    unestimated: float
    waiting: float
    copying: float
    flops: float
    """As the compiler counts them: what is computed again counts again."""
    collectives: tuple["CollectiveSum", ...]
    parts: tuple[tuple[str, float], ...]
    """The most expensive ones: module and pass, and its operation; with their seconds."""
    depths: tuple[str, ...]
    """What was compiled."""
    record_seconds: float
    compile_seconds: float
    compiler: str
    notes: tuple[str, ...] = ()
    """What the figures leave out."""
    host: float = 0.0
    """In the host's memory."""
    peak: Peak | None = None
    """What takes most memory in the last program that was compiled; None: most is on the chip."""

    @property
    def memory(self) -> float:
        return self.arguments + self.temporaries

    @property
    def seconds(self) -> float:
        return self.estimated + self.unestimated + self.waiting + self.copying

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        found = asdict(self) | {"memory": self.memory, "seconds": self.seconds, "band": BAND}
        found["modelled"] = ["unestimated", "waiting", "copying", "collectives.seconds"]
        return found


@dataclass(frozen=True)
class CollectiveSum:
    """All collectives of one kind along the same axes of the mesh."""

    kind: str
    axes: str
    """BETWEEN_SLICES where the network carries it."""
    count: float
    num_bytes: float
    seconds: float
    """Modelled, whether compute hides them or not."""


class DoesNotFitError(Exception):
    """The compiler ran out of the device's memory."""

    def __init__(self, used: float, depth: str):
        super().__init__(f"the compiler needs {used / GIB:.1f} GiB for it ({depth})")
        self.used, self.depth = used, depth

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.used, self.depth)


def why_not(topology: Topology) -> str | None:
    """Why nothing can be compiled for it here; None: it can."""
    if devices.of_slices().compiler_version() is None:
        return "libtpu, its compiler, is not installed: pip install 'tputrain[tpu]' (Linux on x86-64)"
    if topology.chip.name == "cpu":
        return f"topology {topology.name}: libtpu compiles only for TPUs; give one such as v5e:4x4"
    return None


def compile_step(subject: Subject, is_whole: bool = False) -> CompiledStep:
    """Record and compile it. In a process that stands for a rank of the slice (`start_slice`).

    `is_whole`: all layers are compiled, however many there are.

    Raises UserError where it cannot be recorded, DoesNotFitError where it is too large.
    """
    depths = _depths(subject.make_model())
    if is_whole:
        depths = replace(depths, compiled=(depths.wanted,))
    found, said, record_seconds, compile_seconds = [], [], 0.0, 0.0
    notes: dict[str, None] = {}  # in order
    for depth in depths.compiled:
        one = _compiled(subject, depths, depth)
        found.append(one.figures)
        said.append(depths.said(depth))
        notes |= dict.fromkeys(one.notes)
        record_seconds += one.record_seconds
        compile_seconds += one.compile_seconds
    figures: Figures = defaultdict(float, found[0])
    for number, figures_of_more in enumerate(found[1:]):
        few, more = (depths.compiled[place][number] for place in (0, number + 1))
        times = (depths.wanted[number] - few) / (more - few)
        for key in {*found[0], *figures_of_more}:
            figures[key] += times * (figures_of_more[key] - found[0][key])
    if (modelled := subject.temporaries_of) is not None:
        shares = [sum(each) / max(1, sum(depths.wanted)) for each in depths.compiled]
        figures["temporaries",] = max(
            one["temporaries",] + modelled(1) - modelled(share)
            for one, share in zip(found, shares, strict=True)
        )
    found_step = _step(figures, tuple(said), tuple(notes), record_seconds, compile_seconds)
    return replace(found_step, peak=one.peak)


def start_slice(topology: Topology) -> None:
    """Make this process stand for one rank of the slice. Once, before it uses the device.

    Raises UserError where libtpu knows no such slice.
    """
    try:
        devices.of_slices().start(_name(topology))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"topology {topology.name}: {error}") from error


def _name(topology: Topology) -> str:
    """Of the topology for libtpu."""
    return topology.name


# -- depths ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Depths:
    """Layers of each list of blocks."""

    wanted: tuple[int, ...]
    compiled: tuple[tuple[int, ...], ...]

    def said(self, depth: Sequence[int]) -> str:
        if tuple(depth) == self.wanted:
            return "the whole step"
        return f"{' and '.join(map(str, depth))} of {' and '.join(map(str, self.wanted))} layers"


def _depths(model: nn.Module) -> _Depths:
    wanted, few, more = [], [], []
    for layers in lists_of_blocks(model):
        size, whole = period(layers), len(layers)
        wanted.append(whole)
        is_long = size * MORE < whole and whole % size == 0
        few.append(size * FEW if is_long else whole)
        more.append(size * MORE if is_long else whole)
    compiled = [tuple(few)]
    for place, (a, b) in enumerate(zip(few, more, strict=True)):
        if a != b:
            compiled.append((*few[:place], b, *few[place + 1 :]))
    return _Depths(tuple(wanted), tuple(compiled))


def shorten(model: nn.Module, depth: Sequence[int]) -> None:
    """Keep the first layers of each list of blocks, in place."""
    for layers, count in zip(list(lists_of_blocks(model)), depth, strict=True):
        del layers[count:]


# -- one compilation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _One:
    figures: Figures
    notes: tuple[str, ...]
    peak: Peak | None
    record_seconds: float
    compile_seconds: float


def _compiled(subject: Subject, depths: _Depths, depth: Sequence[int]) -> _One:
    layout, cfg = subject.layout, subject.cfg
    micro_batches = cfg.trainer.accumulate
    few = min(micro_batches, 2)
    model = subject.make_model()
    shorten(model, depth)
    cfg = replace(cfg, trainer=replace(cfg.trainer, accumulate=few))
    what = f"{depths.said(depth)} for {layout.topology.name}"
    with announced(f"recording {what}"):
        step = abstract_step(model, cfg, subject.batch, subject.loss_fn)
    slices = devices.of_slices()
    began = time.perf_counter()
    try:
        with announced(f"compiling {what}"):
            compiled = slices.compile_for(_name(layout.topology), step.segment, order=chips_by_rank(layout))
    except Exception as error:
        raise _refusal(error, depths.said(depth)) from error
    seconds = time.perf_counter() - began
    program = devices.program_of(compiled.as_text())
    figures, notes = _figures(compiled, program, layout, micro_batches / few)
    most = peak_of(program)
    is_told = most.num_bytes > _LEAST_OF_PEAK * figures["temporaries",]
    return _One(figures, notes, most if is_told else None, step.seconds, seconds)


def largest_of_a_layer(subject: Subject) -> str | None:
    """What takes most memory with one layer, in words: of a step that it cannot place the compiler says
    nothing. None: one layer is too much, or most of it is on the chip.
    """
    depths = _depths(subject.make_model())
    one = tuple(min(1, each) for each in depths.wanted)
    try:
        most = _compiled(subject, depths, one).peak
    except (DoesNotFitError, UserError):
        return None
    if most is None:
        return None
    named = ", ".join(f"{each.sized} ({each.said})" for each in most.largest[:3])
    return f"with {depths.said(one)}: {named}"


def scheduled_step(program: Any, layout: Layout) -> Schedule:
    """The walk over a `tpu_backend.hlo.Program` whose devices are in the order of `chips_by_rank`."""
    return schedule(program, layout.topology, _groups(layout).seconds)


def _groups(layout: Layout) -> "_Groups":
    places = _places(layout.topology)
    return _Groups(layout, [places[chip] for chip in chips_by_rank(layout)])


def _refusal(error: Exception, depth: str) -> Exception:
    match = _OUT_OF_MEMORY.search(str(error))
    if match is not None:
        return DoesNotFitError(float(match[1]) * _UNITS[match[2]], depth)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return UserError(f"the TPU compiler refuses the step ({depth}): {reason}")


def chips_by_rank(layout: Layout) -> list[int]:
    """Of each rank its chip, so that the axes of the mesh lie on those of the torus as the layout says."""
    mesh = mesh_of(layout, _places(layout.topology))
    return [chip for replica in mesh for shard in replica for context in shard for chip in context]


def _places(topology: Topology) -> list[tuple[int, ...]]:
    """Of each chip its slice, and its coordinates along the topology's axes."""
    names = ("slice", "x", "y", "z", "core")
    axes = [names.index(axis.name) for axis in topology.axes]
    found = devices.of_slices().places(_name(topology))
    return [(place[0], *(place[axis] for axis in axes)) for place in found]


def _figures(compiled: Any, program: Any, layout: Layout, times: float) -> tuple[Figures, tuple[str, ...]]:
    """With notes. `times`: the micro-batches of a step for each that was compiled."""
    memory = compiled.memory_analysis()
    found: Figures = defaultdict(float)
    found["arguments",] = memory.argument_size_in_bytes + max(
        0, memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    found["temporaries",] = memory.temp_size_in_bytes
    found["host",] = memory.host_temp_size_in_bytes
    groups = _groups(layout)
    scheduled = scheduled_step(program, layout)
    once = sum(seconds for label, seconds in scheduled.by_label.items() if label in ONCE)
    scale = 1.0 if scheduled.total == 0 else (once + times * (scheduled.total - once)) / scheduled.total
    for kind in ("estimated", "unestimated", "waiting", "copying"):
        found["seconds", kind] = scale * getattr(scheduled, kind)
    found["flops",] = times * (compiled.cost_analysis() or {}).get("flops", 0.0)
    for collective, seconds in scheduled.collectives:
        axes = " x ".join(groups.axes(collective.group)) or "none"
        if collective.num_slices > 1:
            axes = BETWEEN_SLICES
        found["collective", collective.kind, axes, "count"] += times
        found["collective", collective.kind, axes, "bytes"] += times * collective.num_bytes
        found["collective", collective.kind, axes, "seconds"] += times * seconds
    for (label, operation), seconds in scheduled.by_operation.items():
        found["part", label, operation] += seconds * (1 if label in ONCE else times)
    return found, tuple(
        f"the turns of the loop {name}{f' ({label})' if label else ''} are not known: it counts once"
        for name, label in scheduled.unknown_loops.items()
    )


class _Groups:
    """The groups of collectives: axes of the mesh, and where they lie on the torus."""

    def __init__(self, layout: Layout, places: Sequence[tuple[int, ...]]):
        """`places`: of each rank."""
        self._layout, self._places = layout, places
        self._names = tuple(reversed(INNERMOST_FIRST))
        self._sizes = [layout.degrees[name] for name in self._names]

    def axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """Those along which the members differ."""
        places = [self._in_mesh(each) for each in group]
        return tuple(
            name for dim, name in enumerate(self._names) if len({place[dim] for place in places}) > 1
        )

    def _in_mesh(self, rank: int) -> tuple[int, ...]:
        place = []
        for size in reversed(self._sizes):
            rank, own = divmod(rank, size)
            place.append(own)
        return tuple(reversed(place))

    def on_torus(self, group: Sequence[int]) -> Group:
        """The stretches of the torus axes that the members take."""
        slices, *along = (
            sorted(set(each)) for each in zip(*(self._places[rank] for rank in group), strict=True)
        )
        stretches = tuple(
            Stretch(axis, len(own), own[1] - own[0])
            for axis, own in zip(self._layout.topology.axes, along, strict=True)
            if len(own) > 1
        )
        return Group(stretches, len(slices))

    def seconds(self, collective: Any) -> float:
        topology, num_bytes = self._layout.topology, collective.num_bytes
        ways = 2 if collective.kind == "all-reduce" else 1
        if collective.num_slices > 1:
            # Bytes are those that a chip gives. Of a gather, all others get all of them.
            ways = collective.num_slices if collective.kind == "all-gather" else ways
            share = (collective.num_slices - 1) / collective.num_slices
            return ways * share * num_bytes / topology.dcn_bandwidth
        group = self.on_torus(collective.group)
        if collective.kind == "collective-permute":
            return num_bytes / topology.axes[0].bandwidth + group.latency
        if collective.kind == "all-to-all":  # a quarter of a gather of as many bytes (scaling book)
            return group.gather_seconds(num_bytes * group.size) / 4
        seconds = ways * group.gather_seconds(num_bytes)
        if group.slices > 1:
            share = (group.slices - 1) / group.slices
            seconds += ways * share * num_bytes / group.size / topology.dcn_bandwidth
        return seconds


def _step(
    figures: Figures,
    depths: tuple[str, ...],
    notes: tuple[str, ...],
    record_seconds: float,
    compile_seconds: float,
) -> CompiledStep:
    def seconds(kind: str) -> float:
        return max(0.0, figures["seconds", kind])

    sums = [
        CollectiveSum(
            kind, axes, *(figures["collective", kind, axes, what] for what in ("count", "bytes", "seconds"))
        )
        for _, kind, axes in sorted({key[:3] for key in figures if key[0] == "collective"})
    ]
    parts = {
        f"{key[1] or 'made by the compiler'}: {key[2]}": value
        for key, value in figures.items()
        if key[0] == "part"
    }
    return CompiledStep(
        arguments=figures["arguments",],
        temporaries=figures["temporaries",],
        estimated=seconds("estimated"),
        unestimated=seconds("unestimated"),
        waiting=seconds("waiting"),
        copying=seconds("copying"),
        flops=figures["flops",],
        collectives=tuple(sorted(sums, key=lambda each: -each.seconds)),
        parts=tuple(sorted(parts.items(), key=lambda each: -each[1])[:10]),
        depths=depths,
        record_seconds=record_seconds,
        compile_seconds=compile_seconds,
        compiler=f"libtpu {devices.of_slices().compiler_version()}",
        notes=notes,
        host=max(0.0, figures["host",]),
    )
