"""Reads an optimized program's text (`jax.stages.Compiled.as_text`): its instructions and collectives."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

_KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = (.+?) ([a-z][\w-]*)\(([^)]*)\)(.*)$")
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_DIGITS = re.compile(r"\d+")
_NAME = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_IN_PLACE = re.compile(r'"aliasing_operands":\{"lists":\[((?:\{[^}]*\},?)*)\]')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_MOST_CYCLES = 2**50
_LAID_OUT = re.compile(r"[a-z]\w*\[[\d,]*\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_HOST = 5  # memory space of the host; 0 is the device's memory, others are on the chip
_INDEX = re.compile(r"index=(\d+)")
_CONDITION = re.compile(r"condition=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CHAIN = re.compile(r'chain_id="(\d+)"')
_GROUPS = re.compile(r"replica_groups=(\{\{[\d,{}]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))? \{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_SOURCES = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
_KERNEL = re.compile(r"_(fwd|dq|dkv)(?:_|$)")
# Traffic between slices is a `send` to the host and a `recv` from it, with these attributes.
_BETWEEN_SLICES = re.compile(
    r'_xla_host_transfer_rendezvous="([^"]+)".*_xla_megascale_target="\{([\d,]+)\}.*'
    r'_xla_megascale_transfer_type="(\w+)"'
)
_ATTENTION = re.compile(r'attention="(\d+) (\d+) (\d+)"')
# JAX writes what it tells a profiler of a Pallas kernel over three lines.
_KERNEL_METADATA = re.compile(r"kernel_metadata=\{\n(.*)\n\}")

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Collective:
    """One that the program launches."""

    kind: str  # all-gather, all-reduce, reduce-scatter, all-to-all, collective-permute, all-reduce-scatter
    results: Shapes  # dtype and dims of each
    is_async: bool  # other work may run meanwhile
    computation: str
    operands: Shapes = ()
    group: tuple[int, ...] = ()
    """The first of the groups of devices that do it, by their places in the program's mesh."""
    chain: str | None = None
    """What its parts have in common where fusions carry its steps."""
    num_slices: int = 1
    """More than one: the network between slices carries it. Bytes are those of a chip."""

    @property
    def num_bytes(self) -> int:
        """Of all results; of a reduce-scatter of its operands: what is on its way in a group."""
        return num_bytes(self.operands if "scatter" in self.kind and self.operands else self.results)


@dataclass(frozen=True)
class AttentionKernel:
    """A Pallas kernel of splash attention (`tpu_backend/lowering/splash_attention.py`)."""

    kind: str  # fwd, dq, dkv
    pairs: int
    """Of a query and a key in its blocks, over all heads and sequences."""
    of_keys: int
    """Features of a head's queries and keys."""
    of_values: int
    """Features of its values."""

    @property
    def products(self) -> tuple[int, ...]:
        """The features of its matrix products; scores that are computed again count again."""
        keys, values = self.of_keys, self.of_values
        return {"fwd": (keys, values), "dq": (keys, values, keys), "dkv": (keys, values, values, keys)}[
            self.kind
        ]


@dataclass(frozen=True)
class Transfer:
    """One end of what the network between slices carries for a chip: a `send`, or the `recv` of a result."""

    rendezvous: str
    """The same at both ends."""
    kind: str  # as those of collectives
    num_slices: int


@dataclass(frozen=True)
class Instruction:
    """One of a computation. They run in their order."""

    name: str
    opcode: str
    results: Shapes
    operands: tuple[str, ...]
    called: str | None
    """The computation that it runs: a fusion's, a loop's body."""
    text: str
    """What stands behind its operands."""
    constant: str = ""
    """Its value, as it is written."""
    spaces: tuple[int, ...] = ()
    """Of each result its memory: 0 is the device's, others are the host's or on the chip."""

    is_root: bool = False
    """Whether its results are those of its computation."""

    @property
    def is_of_host(self) -> bool:
        """Whether a result is in the host's memory; also of a copy from there: the results of a `copy-start`
        include its source.
        """
        return _HOST in self.spaces

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Of each result its bytes."""
        return tuple(num_bytes((each,)) for each in self.results)

    @cached_property
    def index(self) -> int | None:
        """Of a `get-tuple-element`: which one."""
        found = _INDEX.search(self.text) if self.opcode == "get-tuple-element" else None
        return None if found is None else int(found[1])

    @cached_property
    def cycles(self) -> int | None:
        """The compiler's estimate for a core, if it made one. Some of its sums overflow: they are none."""
        found = _CYCLES.search(self.text)
        return None if found is None or int(found[1]) > _MOST_CYCLES else int(found[1])

    @cached_property
    def in_place(self) -> tuple[tuple[int, int], ...]:
        """Results that may take the memory of an operand: the places of an operand and of a result."""
        found = _IN_PLACE.search(self.text)
        lists = [] if found is None else found[1].split("}")
        alike = [[int(digits) for digits in _DIGITS.findall(each)] for each in lists]
        first = len(self.operands)  # the compiler counts results on from the operands
        return tuple(
            (operand, place - first)
            for each in alike
            for operand in each
            for place in each
            if operand < first <= place
        )

    @property
    def is_pallas_kernel(self) -> bool:
        """Whether it is a kernel for the TPU that the compiler has no estimate for."""
        return self.opcode == "custom-call" and 'custom_call_target="tpu_custom_call"' in self.text

    @cached_property
    def kernel_flops(self) -> int:
        """FLOPs of a kernel for the TPU by its author's estimate; 0: there is none."""
        found = _FLOPS.search(self.text) if self.is_pallas_kernel else None
        return 0 if found is None else int(found[1])

    @cached_property
    def attention_kernel(self) -> AttentionKernel | None:
        """The attention that it computes, if it is a kernel of ours."""
        work, kind = _ATTENTION.search(self.text), _KERNEL.search(self.name)
        if not self.is_pallas_kernel or work is None or kind is None:
            return None
        return AttentionKernel(kind[1], *map(int, work.groups()))

    @cached_property
    def transfer(self) -> Transfer | None:
        """Which end of a transfer between slices it is, if it is one."""
        found = _BETWEEN_SLICES.search(self.text) if self.opcode in ("send", "recv") else None
        if found is None:
            return None
        return Transfer(found[1], found[3].lower().replace("_", "-"), len(found[2].split(",")))

    @cached_property
    def op_name(self) -> str:
        """The scopes it was traced in, as JAX names them."""
        found = _OP_NAME.search(self.text)
        return "" if found is None else found[1]


@dataclass(frozen=True)
class Program:
    """All computations by name."""

    entry: str
    computations: dict[str, tuple[Instruction, ...]]

    @cached_property
    def _shapes(self) -> dict[str, Shapes]:
        return {each.name: each.results for some in self.computations.values() for each in some}

    def num_bytes(self, instruction: Instruction) -> int:
        """What it reads and writes."""
        read = sum(num_bytes(self._shapes.get(name, ())) for name in instruction.operands)
        return read + num_bytes(instruction.results)

    def trips(self, loop: Instruction) -> int | None:
        """How often a loop's body runs: as the compiler notes it, or up to the constant that its counter,
        from 0 on, is compared with. None if neither is there: the number depends on values.
        """
        if (noted := _TRIPS.search(loop.text)) is not None:
            return int(noted[1])
        condition = _CONDITION.search(loop.text)
        instructions = self.computations.get(condition[1], ()) if condition is not None else ()
        if not instructions:
            return None
        constants = {each.name: each.constant for each in instructions if each.constant.isdecimal()}
        last = instructions[-1]
        if last.opcode != "compare" or "direction=LT" not in last.text or last.operands[-1] not in constants:
            return None
        return int(constants[last.operands[-1]])

    def collective(self, instruction: Instruction, computation: str) -> Collective | None:
        """What it does with other devices, if it does."""
        if instruction.opcode == "send" and (transfer := instruction.transfer) is not None:
            sent = instruction.results[:1]
            return Collective(transfer.kind, sent, True, computation, sent, num_slices=transfer.num_slices)
        kind, _, start = instruction.opcode.partition("-start")
        if kind not in _KINDS or start:
            return None
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "all-reduce-scatter"
        chain = _CHAIN.search(instruction.text)
        is_async = (
            instruction.opcode.endswith("-start")
            or "async_collective" in computation
            or "async_collective_name" in instruction.text
            or '"DEVICE_TYPE_SPARSECORE"' in instruction.text
        )
        operands = tuple(shape for name in instruction.operands for shape in self._shapes.get(name, ()))
        return Collective(
            kind,
            instruction.results,
            is_async,
            computation,
            operands,
            _first_group(instruction.text),
            None if chain is None else chain[1],
        )

    def collectives_of(self, computation: str) -> Iterator[Collective]:
        for instruction in self.computations.get(computation, ()):
            found = self.collective(instruction, computation)
            if found is not None:
                yield found


def program(text: str) -> Program:
    """The program of a text."""
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = name = ""
    current: list[Instruction] = []
    for line in _KERNEL_METADATA.sub(r"kernel_metadata={\1}", text).splitlines():
        if (begins := _COMPUTATION.match(line)) is not None:
            name, current = begins[2], []
            entry = name if begins[1] else entry
        elif line.startswith("}"):
            computations[name] = tuple(current)
        elif (match := _INSTRUCTION.match(line)) is not None:
            root, own, results, opcode, operands, rest = match.groups()
            called = _CALLED.search(rest)
            current.append(
                Instruction(
                    own,
                    opcode,
                    _shapes(results),
                    tuple(_NAME.findall(operands)),
                    None if called is None else called[1],
                    rest,
                    operands if opcode == "constant" else "",
                    tuple(_space(layout) for layout in _LAID_OUT.findall(results)),
                    root is not None,
                )
            )
    return Program(entry, computations)


def collectives(text: str) -> list[Collective]:
    """All of a program, in the order of its text.

    An all-reduce inside a fusion `all-reduce-scatter` is a reduce-scatter: each chip keeps its part. A fusion
    that carries a step of a collective (`async_collective_fusion`) names it once a step: those are async.
    """
    found = program(text)
    return [each for name in found.computations for each in found.collectives_of(name)]


def num_bytes(shapes: Shapes) -> int:
    return sum(_itemsize(dtype) * math.prod(dims) for dtype, dims in shapes)


def _shapes(text: str) -> Shapes:
    return tuple(
        (dtype, tuple(map(int, filter(None, dims.split(","))))) for dtype, dims in _SHAPE.findall(text)
    )


def _space(layout: str) -> int:
    found = _SPACE.search(layout)
    return 0 if found is None else int(found[1])


def _first_group(text: str) -> tuple[int, ...]:
    if (pair := _SOURCES.search(text)) is not None:
        return int(pair[1]), int(pair[2])
    if (mesh := _MESH.search(text)) is not None:
        return _first_group_of_mesh(mesh)
    if (match := _GROUPS.search(text)) is None:
        if "replica_groups=mesh" in text:
            raise ValueError(f"replica groups in a form that is not known: {text}")
        return ()
    written = match[1]
    if written.startswith("{"):
        return tuple(map(int, written[2:].partition("}")[0].split(",")))
    # [groups, size]<=[dims]T(order): numbers counted up over dims, transposed, and cut into groups
    sizes, _, rest = written[1:].partition("]<=[")
    dims_text, _, order_text = rest.partition("]")
    dims = _numbers(dims_text)
    order = _numbers(order_text[2:-1]) if order_text else list(range(len(dims)))
    return _counted(dims, order, int(sizes.split(",")[-1]))


def _first_group_of_mesh(match: re.Match[str]) -> tuple[int, ...]:
    """mesh['a'=4,'b'=2] {'b'}: the devices along axes of a mesh of all; 'a':(2)2 is a part of an axis, behind
    a part of 2. With device_ids the mesh has the devices in that order: a list, or ([4,2]T(1,0)), numbers
    counted up over dims, transposed.
    """
    sizes = {name: int(size) for name, size, _, _ in _MESH_AXIS.findall(match[1])}
    # Of each axis its parts: which of them the group goes along, by the place of the axis among the group's.
    along: dict[str, list[tuple[int, int]]] = {name: [] for name in sizes}
    wanted = []
    for name, _, before, size in _MESH_AXIS.findall(match[5]):
        part = (int(before), int(size)) if size else (1, sizes[name])
        along[name].append(part)
        wanted.append((name, part))
    dims: list[int] = []
    places: dict[tuple[str, tuple[int, int]], int] = {}
    for name, size in sizes.items():
        done = 1
        for before, own in sorted(along[name]):
            if before > done:
                dims.append(before // done)
            places[name, (before, own)] = len(dims)
            dims.append(own)
            done = before * own
        dims.append(size // done)
    order = [places[each] for each in wanted]
    group = _counted(dims, order, math.prod(dims[dim] for dim in order))
    if match[4] is not None:
        devices = tuple(_numbers(match[4]))
    elif match[2] is not None:
        counted = _numbers(match[2])
        transposed = list(range(len(counted))) if match[3] is None else _numbers(match[3])
        devices = _counted(counted, transposed, math.prod(counted))
    else:
        return group
    return tuple(devices[place] for place in group)


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _counted(dims: list[int], order: list[int], size: int) -> tuple[int, ...]:
    """The first `size` devices, numbered over `dims`, where the last dim of `order` counts up first."""
    strides = [math.prod(dims[place + 1 :]) for place in range(len(dims))]
    found = []
    for number in range(size):
        place, rest = 0, number
        for dim in reversed(order):
            rest, own = divmod(rest, dims[dim])
            place += own * strides[dim]
        found.append(place)
    return tuple(found)


def _itemsize(dtype: str) -> int:
    bits = _DIGITS.search(dtype)
    return 1 if bits is None else max(int(bits[0]) // 8, 1)
