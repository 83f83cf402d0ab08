"""How long a compiled step takes: a walk over its instructions in the order in which the compiler put them.

From the compiler: the order, what runs beside what, and its estimated cycles of a core. Modelled, as it gives
none: collectives (bytes over the bandwidth of their torus axes, and hops), copies within the memory and to
the host's, kernels of attention (their products), and operations without an estimate (the bytes that they
read and write).
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tputrain.parallel.blocks import without_numbers
from tputrain.parallel.cost_model import MXU_SHARE
from tputrain.parallel.topology import Topology

_FREE = frozenset(
    (
        "parameter",
        "constant",
        "bitcast",
        "get-tuple-element",
        "tuple",
        "after-all",
        "partition-id",
        "replica-id",
    )
)
_ATTENTION_SHARES = {
    "v5e": {"fwd": 0.68, "dq": 0.98, "dkv": 0.98},
    "v6e": {"fwd": 0.51, "dq": 0.78, "dkv": 0.80},
}
"""By chip and kernel, of the peak that the size of a head allows: final schedules of splash attention. Other
chips have v6e's, the lower ones.
"""
_COPIES = ("copy", "slice", "dynamic-slice", "dynamic-update-slice")
_SCOPES = ("jit(run)", "shard_map")
_BEFORE_LINE = ", "

Seconds = Callable[[Any], float]
"""Of a collective (`tpu_backend.hlo.Collective`)."""

KINDS = ("estimated", "unestimated", "waiting", "copying")
"""Seconds by the compiler, of operations without an estimate, for collectives, and for copies within the
memory and to the host's."""


class Origin(NamedTuple):
    """What an instruction was recorded as."""

    label: str
    """The module and its pass; empty: the compiler made it."""
    line: str
    """Of the model, as `file.py:12`; empty: there is none."""
    operation: str
    """As the compiler names it."""

    @property
    def in_words(self) -> str:
        """As people read it."""
        return f"{with_line(self.label or 'made by the compiler', self.line)}: {self.operation}"

    def without_numbers(self) -> "Origin":
        """The same for all layers."""
        return self._replace(label=without_numbers(self.label))


class Spent(NamedTuple):
    """What a core spends time on."""

    place: str
    """The label of the instruction, or of the last one before it that has one."""
    origin: Origin
    kind: str
    """One of KINDS."""


@dataclass
class Schedule:
    """Seconds of a core, by what it does."""

    spent: defaultdict[Spent, float] = field(default_factory=lambda: defaultdict(float))
    collectives: list[tuple[str, Any, float]] = field(default_factory=list)
    """Each with its place, and its seconds, hidden or not."""
    unknown_loops: dict[str, str] = field(default_factory=dict)
    """By name of a loop whose number of turns the program does not tell its label. It counts once."""

    @property
    def total(self) -> float:
        return sum(self.spent.values())


def schedule(program: Any, topology: Topology, collective_seconds: Seconds) -> Schedule:
    """Of a `tpu_backend.hlo.Program`."""
    walk = _Walk(program, topology, collective_seconds)
    walk.run(program.entry)
    return walk.found


class _Walk:
    """Five clocks: of the core, of the links to other chips, of the network between slices, of copies within
    the memory, and of copies between it and the host's.
    """

    def __init__(self, program: Any, topology: Topology, collective_seconds: Seconds):
        self._program, self._topology, self._seconds_of = program, topology, collective_seconds
        self.found = Schedule()
        self._core = self._links = self._network = self._memory = self._host = 0.0
        self._ends: dict[str, float] = {}  # of what was begun, by the name of what began it
        self._chains: dict[str, float] = {}
        self._transfers: dict[str, float] = {}  # between slices: when they end, by their names
        self._received: dict[str, str] = {}  # the transfer of each recv
        self._place = ""

    def run(self, computation: str) -> None:
        for instruction in self._program.computations[computation]:
            self._step(instruction, computation)

    def _step(self, instruction: Any, computation: str) -> None:
        opcode, program = instruction.opcode, self._program
        if opcode in _FREE:
            return
        self._place = origin(instruction).label or self._place
        if opcode == "while":
            if (trips := program.trips(instruction)) is None:
                self.found.unknown_loops[instruction.name] = origin(instruction).label
                trips = 1
            for _ in range(trips):
                self.run(instruction.called)
            return
        if (transfer := instruction.transfer) is not None:
            if opcode == "send":
                self._transfers[transfer.rendezvous] = self._send(
                    program.collective(instruction, computation)
                )
            else:
                self._received[instruction.name] = transfer.rendezvous
            return
        if opcode == "recv-done" and instruction.operands[0] in self._received:
            self._wait(instruction, self._transfers[self._received[instruction.operands[0]]])
            return
        kind, _, stage = opcode.rpartition("-")
        if stage == "done" and instruction.operands and instruction.operands[0] in self._ends:
            what = "copying" if kind in _COPIES else "waiting"
            self._wait(instruction, self._ends.pop(instruction.operands[0]), what)
            return
        if stage == "start" and kind in _COPIES:
            self._ends[instruction.name] = self._copy(instruction)
            return
        if opcode == "call-start":  # of another core: the SparseCore does collectives
            for each in program.collectives_of(instruction.called):
                self._ends[instruction.name] = self._send(each)
            return
        if (collective := program.collective(instruction, computation)) is not None:
            end = self._send(collective)
            if stage == "start":
                self._ends[instruction.name] = end
            else:
                self._wait(instruction, end)
            return
        inner = list(program.collectives_of(instruction.called)) if opcode == "fusion" else []
        chains = {each.chain for each in inner if each.chain is not None}
        for each in inner:
            if each.chain is None:
                self._wait(instruction, self._send(each))
            elif each.chain not in self._chains:
                self._chains[each.chain] = self._send(each)
        if instruction.name.startswith("async-collective-done"):
            for chain in chains:
                self._wait(instruction, self._chains[chain])
            return
        self._compute(instruction, has_collective=bool(inner))

    def _compute(self, instruction: Any, has_collective: bool) -> None:
        if instruction.cycles is not None:
            self._spend(instruction, instruction.cycles / self._topology.chip.clock, "estimated")
        elif instruction.is_pallas_kernel:
            self._spend(instruction, self._kernel_seconds(instruction), "unestimated")
        elif instruction.opcode == "fusion" and not has_collective:
            seconds = self._program.num_bytes(instruction) / self._topology.hbm_bandwidth
            self._spend(instruction, seconds, "unestimated")
        # Else it is a number, or what the compiler does in no time.

    def _kernel_seconds(self, instruction: Any) -> float:
        """Of a kernel for the TPU: limited by the matrix unit, or by reading and writing."""
        moved = self._program.num_bytes(instruction) / self._topology.hbm_bandwidth
        kernel, chip = instruction.attention_kernel, self._topology.chip
        if kernel is None:  # its products are taken to be as good as the compiler's own
            return max(moved, instruction.kernel_flops / (chip.peak_flops * MXU_SHARE[chip.name]))
        # Fewer features than the matrix unit is wide take as long as so many.
        flops = 2 * kernel.pairs * sum(max(features, chip.mxu) for features in kernel.products)
        share = _ATTENTION_SHARES.get(chip.name, _ATTENTION_SHARES["v6e"])[kernel.kind]
        return max(moved, flops / (chip.peak_flops * share))

    def _send(self, collective: Any) -> float:
        """Begin a collective; when it ends. The links take one after the other, as does the network."""
        seconds = self._seconds_of(collective)
        self.found.collectives.append((self._place, collective, seconds))
        if collective.num_slices > 1:
            self._network = max(self._network, self._core) + seconds
            return self._network
        self._links = max(self._links, self._core) + seconds
        return self._links

    def _copy(self, instruction: Any) -> float:
        """Begin a copy; when it ends."""
        num_bytes = self._program.num_bytes(instruction)
        if instruction.is_of_host:  # it has what it reads among its results, too
            self._host = max(self._host, self._core) + num_bytes / 3 / self._topology.pcie_bandwidth
            return self._host
        # 1.5 times what is copied: to the chip's own memory it is read, within the device's written, too.
        self._memory = max(self._memory, self._core) + num_bytes / 2 / self._topology.hbm_bandwidth
        return self._memory

    def _wait(self, instruction: Any, end: float, kind: str = "waiting") -> None:
        self._spend(instruction, max(0.0, end - self._core), kind)

    def _spend(self, instruction: Any, seconds: float, kind: str) -> None:
        self._core += seconds
        self.found.spent[Spent(self._place, origin(instruction), kind)] += seconds


def origin(instruction: Any) -> Origin:
    """Of an instruction: `with_line` of its label and its line is the first scope of its name."""
    names = [each for each in instruction.op_name.split("/") if each and each not in _SCOPES]
    label, _, line = (names[0] if len(names) > 1 else "").partition(_BEFORE_LINE)
    return Origin(label, line, names[-1] if names else instruction.opcode)


def with_line(label: str, line: str) -> str:
    """A label that names a line, too."""
    return f"{label}{_BEFORE_LINE}{line}" if label and line else label
