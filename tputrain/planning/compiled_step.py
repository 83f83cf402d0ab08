"""What the TPU compiler says of a plan: its step is recorded and compiled for the slice, which is not here.

Compile time must not grow with depth. Of layers that are alike few are compiled. Time is counted by the layer
that it is spent in: that of the layers between the first and the last one as often as there are such layers
in the model. Memory and FLOPs grow as the planner's model says. What is done once a micro-batch is compiled
for two at most, and counted as often as it is done.
"""

import re
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from tputrain import device as devices
from tputrain.announce import announced, say
from tputrain.batches import Batch
from tputrain.config import RunConfig
from tputrain.errors import UserError, first_line
from tputrain.figures import memory_text
from tputrain.loss import LossFunction
from tputrain.parallel.blocks import lists_of_blocks, period, without_numbers
from tputrain.parallel.candidate import Modelled
from tputrain.parallel.layout import INNERMOST_FIRST, Group, Layout, Stretch, mesh_of
from tputrain.parallel.step_schedule import Schedule, schedule
from tputrain.parallel.topology import Topology
from tputrain.planning.abstract_step import ONCE, abstract_step
from tputrain.planning.peak import Peak
from tputrain.planning.peak import peak as peak_of

SHOWN = 0.005
"""Of a step: shares below are not shown."""
FEW = 4
"""Layers that are compiled. The first and the last one have other neighbours than those between them."""
BAND = 0.15
"""Of predicted seconds: what a predictor of this kind came to on public steps. Not measured for this one."""
# libtpu says it in two ways. Both numbers are of arguments and temporaries together.
_OUT_OF_MEMORY = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEAST_OF_PEAK = 0.5  # of the temporaries
SECONDS_OF_STEP = (
    ("estimated", "by the compiler's cycles"),
    ("waiting", "waiting for collectives (modelled)"),
    ("copying", "copies within the memory (modelled)"),
    ("unestimated", "without an estimate (modelled)"),
)
"""What the seconds of a CompiledStep consist of, in words."""
BETWEEN_SLICES = "replicate, between slices"
"""Only replicas go over the network between slices."""

Figures = defaultdict[tuple[str, ...], float]
"""Numbers by kind and name."""


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
    """The most expensive ones: module and pass, line of the model, and operation; with their seconds."""
    depth: str
    """What was compiled."""
    record_seconds: float
    compile_seconds: float
    compiler: str
    notes: tuple[str, ...] = ()
    """What the figures leave out."""
    host: float = 0.0
    """In the host's memory."""
    peak: Peak | None = None
    """What takes most memory in what was compiled; None: most is on the chip."""

    @property
    def memory(self) -> float:
        return self.arguments + self.temporaries

    @property
    def seconds(self) -> float:
        return sum(getattr(self, name) for name, _ in SECONDS_OF_STEP)

    @property
    def all_parts(self) -> tuple[tuple[str, float], ...]:
        """With the rest of the seconds, where that counts."""
        rest = self.seconds - sum(seconds for _, seconds in self.parts)
        return (*self.parts, ("all others", rest)) if rest > SHOWN * self.seconds else self.parts

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        found = asdict(self) | {"memory": self.memory, "seconds": self.seconds, "band": BAND}
        sizes = ("arguments", "temporaries", "host", "memory")  # estimates of all layers have fractions
        found |= {name: round(found[name]) for name in sizes}
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
        super().__init__(f"the compiler needs {memory_text(used)} for it ({depth})")
        self.used, self.depth = used, depth

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.used, self.depth)


def why_not(topology: Topology) -> str | None:
    """Why nothing can be compiled for it here; None: it can."""
    if devices.of_slices().compiler_version() is None:
        return "libtpu, its compiler, is not installed: pip install 'tputrain[tpu]' (Linux on x86-64)"
    if topology.chip.is_stand_in:
        return f"topology {topology.name}: libtpu compiles only for TPUs; give one such as v5e:4x4"
    return None


Shares = Callable[[str], float]
"""How much of the layers of a name ("model.layers.*") there is."""


def compile_step(subject: Subject, modelled: Callable[[Shares], Modelled] | None = None) -> CompiledStep:
    """Record and compile it. In a process that stands for a rank of the slice (`start_slice`).

    `modelled`: memory and FLOPs by the planner's models, with a share of the layers: few of them are
    compiled. None: all are.

    Raises UserError where it cannot be recorded, DoesNotFitError where it is too large.
    """
    depth = _depth(subject.make_model())
    if modelled is None:
        depth = replace(depth, compiled=depth.wanted)
        return _step(_compiled(subject, depth), depth)
    few, all_layers = modelled(depth.share_of), modelled(lambda _: 1.0)
    one = _compiled(subject, depth, _growth(few.memory.optimizer, all_layers.memory.optimizer))
    figures = one.figures
    figures["arguments",] *= _growth(few.memory.arguments, all_layers.memory.arguments)
    figures["temporaries",] += all_layers.memory.temporaries - few.memory.temporaries
    figures["host",] *= _growth(few.memory.host, all_layers.memory.host)
    # In layers the compiler counts other FLOPs than the model has: computed again, and none in kernels.
    of_layers = figures["flops",] - few.flops_of_rest
    figures["flops",] += of_layers * (_growth(few.flops_of_layers, all_layers.flops_of_layers) - 1)
    return _step(one, depth)


def _growth(few: float, all_layers: float) -> float:
    return all_layers / few if few else 1.0


def start_slice(topology: Topology) -> None:
    """Make this process stand for one rank of the slice. Once, before it uses the device. Where jax and
    libtpu do not match, a line says so.

    Raises UserError where libtpu knows no such slice.
    """
    slices = devices.of_slices()
    if (differs := slices.mismatch()) is not None:
        say(f"note: {differs}")
    try:
        slices.start(topology.name)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"topology {topology.name}: {error}") from error


# -- depth -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Depth:
    """Layers of each list of blocks."""

    names: tuple[str, ...]
    """Of the layers of each list: "model.layers.*"."""
    wanted: tuple[int, ...]
    compiled: tuple[int, ...]

    @property
    def said(self) -> str:
        if self.compiled == self.wanted:
            return "the whole step"
        return f"{' and '.join(map(str, self.compiled))} of {' and '.join(map(str, self.wanted))} layers"

    def whole_seconds(self, compile_seconds: float) -> float:
        """About how long all layers take to compile, where these took so long. A further layer took 3 to 12 %
        of four (docs/plan.md, depth).
        """
        further = [max(0, sum(each) - FEW) for each in (self.compiled, self.wanted)]
        return compile_seconds * (1 + 0.1 * further[1]) / (1 + 0.1 * further[0])

    def share_of(self, name: str) -> float:
        """How much of the layers of this name is compiled."""
        counts = [each for each in zip(self.names, self.compiled, self.wanted) if each[0] == name]
        return sum(each[1] for each in counts) / max(1, sum(each[2] for each in counts)) if counts else 1.0


def _depth(model: nn.Module) -> _Depth:
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for layers in lists_of_blocks(model):
        size, whole = period(layers), len(layers)
        is_alike = whole % size == 0 and len({id(each) for each in layers}) == whole
        few = min(size * FEW, whole) if is_alike else whole
        found.append((without_numbers(f"{names[id(layers)]}.0"), whole, few))
    return _Depth(*(tuple(each) for each in zip(*found, strict=True))) if found else _Depth((), (), ())


def _times(model: nn.Module, depth: _Depth) -> dict[str, float]:
    """By the name of each layer of a shortened model: how many layers it stands for."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for layers, wanted, few in zip(lists_of_blocks(model), depth.wanted, depth.compiled, strict=True):
        size = few // FEW
        for number, layer in enumerate(layers):
            is_between = wanted > few and size <= number < few - size
            found[names[id(layer)]] = 1 + (wanted - few) / (few - 2 * size) * is_between
    return found


def _of_label(label: str, of_layers: Mapping[str, float]) -> float:
    """How many layers the one stands for that a label names ("again model.layers.2.mlp"); 1: none is."""
    parts = label.partition(" ")[2].split(".")
    names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return next((of_layers[name] for name in names if name in of_layers), 1.0)


def shorten(model: nn.Module, depth: Sequence[int]) -> None:
    """Keep the first layers of each list of blocks, in place."""
    for layers, count in zip(list(lists_of_blocks(model)), depth, strict=True):
        del layers[count:]


# -- one compilation ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Compiled:
    figures: Figures
    """Seconds and collectives are those of all layers; memory and FLOPs of the ones that were compiled."""
    notes: tuple[str, ...]
    peak: Peak | None
    record_seconds: float
    compile_seconds: float


def _compiled(subject: Subject, depth: _Depth, growth: float = 1.0) -> _Compiled:
    """`growth`: how many times as much all layers have of what the optimizer updates."""
    layout, cfg = subject.layout, subject.cfg
    micro_batches = cfg.trainer.accumulate
    few = min(micro_batches, 2)
    model = subject.make_model()
    shorten(model, depth.compiled)
    of_layers = _times(model, depth)
    cfg = replace(cfg, trainer=replace(cfg.trainer, accumulate=few))
    what = f"{depth.said} for {layout.topology.name}"

    @cache
    def times(label: str) -> float:
        return growth if label in ONCE else micro_batches / few * _of_label(label, of_layers)

    with announced(f"recording {what}"):
        step = abstract_step(model, cfg, subject.batch, subject.loss_fn)
    slices = devices.of_slices()
    began = time.perf_counter()
    try:
        pace = "1 to 5 minutes" if sum(depth.compiled) <= 2 * FEW else "10 minutes and more"
        with announced(f"compiling {what} (expect {pace} on two cores)"):
            compiled = _in_thread(
                lambda: slices.compile_for(layout.topology.name, step.segment, order=chips_by_rank(layout))
            )
    except Exception as error:
        raise _refusal(error, depth.said) from error
    seconds = time.perf_counter() - began
    program = devices.program_of(compiled.as_text())
    figures, notes = _figures(compiled, program, layout, times)
    if step.num_segments > 1:
        notes += (f"the step is {step.num_segments} programs: the figures are of the largest alone",)
    figures["flops",] *= micro_batches / few
    most = peak_of(program)
    is_told = most.num_bytes > _LEAST_OF_PEAK * figures["temporaries",]
    return _Compiled(figures, notes, most if is_told else None, step.seconds, seconds)


def _in_thread(function: Callable[[], Any]) -> Any:
    """Its result, from another thread: the compiler does not hear of Ctrl-C, and this thread does."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="tpu_compiler", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(1.0)
    if errors:
        raise errors[0]
    return found[0]


def largest_of_a_layer(subject: Subject) -> str | None:
    """What takes most memory with one layer, in words: of a step that it cannot place the compiler says
    nothing. None: one layer is too much, or most of it is on the chip.
    """
    depth = _depth(subject.make_model())
    depth = replace(depth, compiled=tuple(min(1, each) for each in depth.wanted))
    try:
        most = _compiled(subject, depth).peak
    except (DoesNotFitError, UserError):
        return None
    if most is None:
        return None
    named = ", ".join(f"{each.amount} ({each.origin})" for each in most.largest[:3])
    return f"with {depth.said}: {named}"


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
    differs = devices.of_slices().mismatch()
    also = "" if differs is None else f"; {differs}"
    return UserError(f"the TPU compiler refuses the step ({depth}): {first_line(error)}{also}")


def chips_by_rank(layout: Layout) -> list[int]:
    """Of each rank its chip, so that the axes of the mesh lie on those of the torus as the layout says."""
    mesh = mesh_of(layout, _places(layout.topology))
    return [chip for replica in mesh for shard in replica for context in shard for chip in context]


def _places(topology: Topology) -> list[tuple[int, ...]]:
    """Of each chip its slice, and its coordinates along the topology's axes."""
    names = ("slice", "x", "y", "z", "core")
    axes = [names.index(axis.name) for axis in topology.axes]
    found = devices.of_slices().places(topology.name)
    return [(place[0], *(place[axis] for axis in axes)) for place in found]


def _figures(
    compiled: Any, program: Any, layout: Layout, times: Callable[[str], float]
) -> tuple[Figures, tuple[str, ...]]:
    """With notes. `times`: how often a step does what has a label, for each time that it was compiled."""
    memory = compiled.memory_analysis()
    found: Figures = defaultdict(float)
    found["arguments",] = memory.argument_size_in_bytes + max(
        0, memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    found["temporaries",] = memory.temp_size_in_bytes
    found["host",] = memory.host_temp_size_in_bytes
    groups = _groups(layout)
    scheduled = scheduled_step(program, layout)
    for spent, seconds in scheduled.spent.items():
        found["seconds", spent.kind] += times(spent.place) * seconds
        found["part", spent.origin.without_numbers().in_words] += times(spent.place) * seconds
    found["flops",] = (compiled.cost_analysis() or {}).get("flops", 0.0)
    for place, collective, seconds in scheduled.collectives:
        axes = " x ".join(groups.axes(collective.group)) or "none"
        if collective.num_slices > 1:
            axes = BETWEEN_SLICES
        found["collective", collective.kind, axes, "count"] += times(place)
        found["collective", collective.kind, axes, "bytes"] += times(place) * collective.num_bytes
        found["collective", collective.kind, axes, "seconds"] += times(place) * seconds
    loops = Counter(without_numbers(label) for label in scheduled.unknown_loops.values())
    return found, tuple(
        f"the turns of loops are not known, each counts once: {count} in {label or 'what the compiler made'}"
        for label, count in loops.items()
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


def _step(one: _Compiled, depth: _Depth) -> CompiledStep:
    figures, differs = one.figures, devices.of_slices().mismatch()
    sums = [
        CollectiveSum(
            kind, axes, *(figures["collective", kind, axes, what] for what in ("count", "bytes", "seconds"))
        )
        for _, kind, axes in sorted({key[:3] for key in figures if key[0] == "collective"})
    ]
    parts = {key[1]: value for key, value in figures.items() if key[0] == "part"}
    notes = list(one.notes)
    if depth.compiled != depth.wanted:
        minutes = max(1, round(depth.whole_seconds(one.compile_seconds) / 60))
        layers = " and ".join(map(str, depth.wanted))
        notes.append(
            f"a run compiles all {layers} layers: about {minutes} minutes at this machine's pace; unless the "
            "host keeps activations, its first steps are in parts meanwhile (execution.first_steps)"
        )
    if differs is not None:
        notes.append(differs)
    return CompiledStep(
        arguments=figures["arguments",],
        temporaries=figures["temporaries",],
        estimated=figures["seconds", "estimated"],
        unestimated=figures["seconds", "unestimated"],
        waiting=figures["seconds", "waiting"],
        copying=figures["seconds", "copying"],
        flops=figures["flops",],
        collectives=tuple(sorted(sums, key=lambda each: -each.seconds)),
        parts=tuple(sorted(parts.items(), key=lambda each: -each[1])[:10]),
        depth=depth.said,
        record_seconds=one.record_seconds,
        compile_seconds=one.compile_seconds,
        compiler=f"libtpu {devices.of_slices().compiler_version()}",
        notes=tuple(notes),
        host=figures["host",],
        peak=one.peak,
    )
