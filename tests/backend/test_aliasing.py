"""Aliasing: programs of views, in-place writes and ``out=`` leave every alias as they do on the CPU, exactly.

A program is a list of Python lines over tensors r0, r1, ...  A random one is written while it runs on the CPU
(which tells what is valid and what must come out) and then run line by line on the device.  A failure prints
it, ready to be pasted behind `SCOPE`.

Values are small integers, so float32 is exact and a fused multiply-add rounds nothing.  Each program runs
with a few sets of runtime values (starts of slices, scalars) that share its shapes: a compiled program takes
those as inputs.

``ALIASING_PROGRAMS=2000`` runs so many random programs a mode, over larger tensors (minutes a mode; choose
one with ``-k debug``, ``-k strict``, ``-k fused``).
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.choices import Choices

HAS_TPU = hasattr(torch, "tpu") and torch.tpu.is_available()
DEVICE = "tpu" if HAS_TPU else "cpu"
# Random programs a mode: each fused one is compiled as a whole, the others share what is compiled for an op.
PROGRAMS = {"debug": 80, "strict": 240, "fused": 70} if HAS_TPU else {"native": 1000}
MANY = int(os.environ.get("ALIASING_PROGRAMS", "0"))
VALUE_SETS = 3
LARGEST = 2**20  # float32 counts exactly to 2**24
MOST_TENSORS = 8

# Few sizes: what one program compiles serves the next.
FIRST_LINES = [
    "torch.arange(6.0, device=device).reshape(2, 3)",
    "torch.arange(6.0, device=device).reshape(3, 2).t()",
    "torch.arange(6, device=device)",
]
MOST_ELEMENTS = 12
if MANY:
    PROGRAMS = dict.fromkeys(PROGRAMS, MANY)
    MOST_ELEMENTS = 48
    FIRST_LINES += [
        "torch.arange(24.0, device=device).reshape(4, 6)",
        "torch.arange(24, device=device).reshape(2, 3, 4)",
        "torch.arange(24.0, device=device).reshape(6, 4).t()",
        "torch.arange(24, device=device)",
        "torch.zeros(2, 3, 4, device=device)",
    ]
# As float32: 0, 1, 2, -3.  What is written to the bytes of a float stays a small integer.
BIT_PATTERNS = [0, 0x3F800000, 0x40000000, 0xC0400000 - 2**32]


def outcome(action: Callable[[], Any]) -> str:
    """What became of an action: the kind and first line of the error it raised, or "done"."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "done"


def through_a_file(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors after `torch.save` and `torch.load`, on the device they were on."""
    file = io.BytesIO()
    torch.save(list(tensors), file)
    file.seek(0)
    return torch.load(file, map_location=tensors[0].device)


SCOPE = {"torch": torch, "deepcopy": copy.deepcopy, "outcome": outcome, "through_a_file": through_a_file}


def eager_mode(mode: str) -> contextlib.AbstractContextManager[Any]:
    return torch.tpu.eager_mode(mode) if HAS_TPU else contextlib.nullcontext()


def interpret(lines: Sequence[str], device: str) -> dict[str, Any]:
    """Run a program; returns its variables: tensors by name, and `seen`, what it read in between."""
    scope: dict[str, Any] = {**SCOPE, "device": device, "seen": []}
    for line in lines:
        exec(line, scope)
    return variables(scope)


def variables(scope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in scope.items() if name == "seen" or isinstance(value, torch.Tensor)}


def assert_same(lines: Sequence[str], actual: dict[str, Any], expected: dict[str, Any]) -> None:
    program = "\n".join(["", f"device = {DEVICE!r}; seen = []", *lines])
    assert actual.keys() == expected.keys(), program
    assert actual["seen"] == expected["seen"], program
    for name in expected.keys() - {"seen"}:
        got, wanted = actual[name], expected[name]
        for trait in ("dtype", "shape", "stride", "storage_offset", "_version", "is_contiguous"):
            of_got, of_wanted = getattr(got, trait), getattr(wanted, trait)
            if callable(of_got):
                of_got, of_wanted = of_got(), of_wanted()
            assert of_got == of_wanted, f"{name}.{trait} is {of_got}, on the CPU {of_wanted} {program}"
        values = got.detach().cpu()
        assert torch.equal(values, wanted), f"{name} is\n{values}\non the CPU\n{wanted}{program}"


# ---- writing programs --------------------------------------------------------------------------------------


class ProgramWriter:
    """Writes a program by running it on the CPU, one line for each code drawn.

    Codes decide the operations and shapes, `runtime` decides starts and scalars.
    """

    def __init__(self, first: int, codes: Sequence[int], runtime: random.Random) -> None:
        self.runtime = runtime
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {**SCOPE, "device": "cpu", "seen": []}
        self.names = (f"r{i}" for i in itertools.count())
        self.make(FIRST_LINES[first % len(FIRST_LINES)])
        self.make(FIRST_LINES[first // len(FIRST_LINES) % len(FIRST_LINES)])
        for code in codes:
            self.add_line(Choices(code))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.scope.items() if isinstance(value, torch.Tensor)}

    def run(self, line: str) -> None:
        try:
            exec(line, self.scope)
        except RuntimeError as error:
            if "refer to a single memory location" not in str(error):
                raise
            return  # the CPU refuses it before it writes: the line is left out
        self.lines.append(line)

    def make(self, expression: str) -> None:
        self.run(f"{next(self.names)} = {expression}")

    def add_line(self, choose: Choices) -> None:
        kind = choose.below(16)
        name = choose.among(list(self.tensors))
        if kind < 5:
            self.view(name, choose)
        elif kind < 9:
            self.write(name, choose)
        elif kind < 10:
            self.compute(name, choose)
        elif kind < 12:
            self.change_storage(name, choose)
        elif kind < 13:
            self.refuse(name, choose)
        elif kind < 14:
            self.copy_with_aliases(name, choose)
        else:
            self.drop_or_look(name, choose)

    # -- views: a new name for the same memory

    def view(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        if len(self.tensors) >= MOST_TENSORS:
            return
        if choose.below(5) == 0:
            self.strided_view(name, choose)
            return
        if tensor.dim() == 0:
            self.make(f"{name}.unsqueeze(0)")
            return
        dim = choose.below(tensor.dim())
        size = tensor.shape[dim]
        views = [
            f"{name}.transpose({dim}, -1)",
            f"{name}.detach()",
            f"{name}.data",
            f"{name}.unsqueeze({dim})",
        ]
        if size > 0:
            length = 1 + choose.below(size)
            views += [
                f"{name}.select({dim}, {self.runtime.randrange(size)})",
                f"{name}.narrow({dim}, {self.runtime.randrange(size - length + 1)}, {length})",
                f"{name}[{':, ' * dim}{choose.below(2)}::2]",
                f"{name}.chunk(2, {dim})[-1]",
            ]
            if tensor.numel() // size * 3 <= MOST_ELEMENTS:
                sizes = ", ".join("3" if each == dim else "-1" for each in range(tensor.dim()))
                views.append(f"{name}.narrow({dim}, {self.runtime.randrange(size)}, 1).expand({sizes})")
        if tensor.dim() == 2:
            views += [f"{name}.t()", f"{name}.diagonal()"]
        if tensor.is_contiguous():
            views += [f"{name}.view(-1)", f"{name}.view(-1, 1)"]
            views += [f"{name}.view(2, -1)"] * (tensor.numel() > 0 and tensor.numel() % 2 == 0)
        if tensor.dtype in (torch.float32, torch.int64) and tensor.stride(-1) == 1:
            views.append(f"{name}.view(torch.int32)")
        self.make(choose.among(views))

    def strided_view(self, name: str, choose: Choices) -> None:
        """Windows over the whole storage: overlapping, interleaved, repeated, with gaps."""
        elements = storage_elements(self.tensors[name])
        windows = [
            ((3, 2), (1, 1)),
            ((2, 2), (1, 2)),
            ((2, 3), (0, 1)),
            ((2,), (3,)),
            ((2, 2), (2, 1)),
            ((), ()),
        ]
        sizes, strides = choose.among(windows)
        room = elements - sum((size - 1) * stride for size, stride in zip(sizes, strides))
        if room > 0:
            self.make(f"{name}.as_strided({sizes}, {strides}, {self.runtime.randrange(room)})")

    # -- writes: in place and out=

    def write(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        number = self.runtime.choice([-3, -2, 2, 3, 5])
        if tensor.dtype == torch.int32:  # the bytes of another tensor
            self.run(f"{name}.fill_({self.runtime.choice(BIT_PATTERNS)})")
            return
        if shares_places_within(
            tensor
        ):  # PyTorch leaves open, or refuses, whatever is not the same everywhere
            self.run(choose.among([f"{name}.fill_({number})", f"{name}.zero_()"]))
            return
        writes = [f"{name}.fill_({number})", f"{name}.zero_()", f"{name}.add_({number})"]
        writes += [f"{name}.mul_({number})"] * (largest(tensor) * 5 < LARGEST)
        sources = [other for other in self.tensors if self.may_be_read_into(other, name)]
        if sources:
            one, two = choose.among(sources), choose.among(sources)
            writes.append(f"{name}.copy_({one})")
            writes += self.arithmetic(name, one, two, number)
        if tensor.dim() and tensor.shape[0] > 1:
            length = 1 + choose.below(tensor.shape[0] - 1)
            start = self.runtime.randrange(tensor.shape[0] - length + 1)
            writes += [f"{name}[{start}:{start + length}] = {number}", f"{name}[{start}] += {number}"]
        self.run(choose.among(writes))

    def arithmetic(self, name: str, one: str, two: str, number: int) -> list[str]:
        """In-place and ``out=`` lines for operands of one dtype with results that stay exact."""
        tensor, a, b = (self.tensors[each] for each in (name, one, two))
        lines = []
        if a.dtype == tensor.dtype:
            lines += [f"{name}.add_({one})", f"{name}.add_({one}, alpha={number})"]
            lines += [f"{name}.mul_({one})"] * (largest(tensor) * largest(a) < LARGEST)
            if b.dtype == tensor.dtype and torch.broadcast_shapes(a.shape, b.shape) == tensor.shape:
                lines.append(f"torch.add({one}, {two}, out={name})")
                lines += [f"torch.mul({one}, {two}, out={name})"] * (largest(a) * largest(b) < LARGEST)
        return lines if max(largest(tensor), largest(a), largest(b)) * 6 < LARGEST else []

    def may_be_read_into(self, source: str, target: str) -> bool:
        """Broadcasts to the target, and is either the same tensor in memory or shares no place with it."""
        a, b = self.tensors[source], self.tensors[target]
        try:
            if torch.broadcast_shapes(a.shape, b.shape) != b.shape:
                return False
        except RuntimeError:
            return False
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
            return True
        same = (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
        return same or not set(places(a)) & set(places(b))

    # -- new memory

    def compute(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        if len(self.tensors) >= MOST_TENSORS:
            return
        fresh = [f"{name}.clone()", f"{name}.contiguous()", f"{name}.reshape(-1)", f"{name} + {name}"]
        if tensor.dim() and tensor.numel() <= MOST_ELEMENTS // 2:
            peers = [
                other
                for other, peer in self.tensors.items()
                if peer.dtype == tensor.dtype and peer.shape == tensor.shape
            ]
            dim = choose.below(tensor.dim())
            fresh.append(f"torch.cat([{name}, {choose.among(peers)}], {dim})")
        if largest(tensor) * 2 < LARGEST:
            self.make(choose.among(fresh))

    # -- the memory under a tensor

    def change_storage(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        if not tensor.untyped_storage().resizable():  # it comes from a file
            return
        elements = storage_elements(tensor)
        number = self.runtime.choice([1, 2, 3])
        peers = [
            other for other, peer in self.tensors.items() if peer.dtype == tensor.dtype and other != name
        ]
        changes = [
            f"{name}.resize_({MOST_ELEMENTS}).fill_({number})",
            f"{name}.untyped_storage().resize_(0); "
            f"{name}.untyped_storage().resize_({elements * tensor.itemsize}); "
            f"{name}.as_strided(({elements},), (1,), 0).fill_({number})",
        ]
        room = min(elements - tensor.storage_offset(), tensor.numel())
        if room > 1:
            changes.append(f"{name}.resize_({1 + choose.below(room)})")
        if peers:
            peer = choose.among(peers)
            changes += [
                f"{name}.data = {peer}",
                f"{name}.set_({peer})",
                f"{name}.set_({peer}.untyped_storage())",
            ]
            if tensor._use_count() == self.tensors[peer]._use_count() == 1:  # no view of either is alive
                changes.append(f"torch.utils.swap_tensors({name}, {peer})")
            start = self.runtime.randrange(max(storage_elements(self.tensors[peer]) - 3, 1))
            if start + 3 <= storage_elements(self.tensors[peer]):
                changes.append(f"{name}.set_({peer}.untyped_storage(), {start}, (2, 2), (2, 1))")
        self.run(choose.among(changes))

    def copy_with_aliases(self, name: str, choose: Choices) -> None:
        """Two tensors are copied together: what they shared they share afterwards, with nobody else."""
        peer = choose.among(list(self.tensors))
        if peer != name and self.tensors[peer].dtype == self.tensors[name].dtype:  # torch.save insists
            how = choose.among(["deepcopy(({}, {}))", "through_a_file({}, {})"])
            self.run(f"{name}, {peer} = {how.format(name, peer)}")

    # -- what PyTorch refuses

    def refuse(self, name: str, choose: Choices) -> None:
        """Writes to places that elements share, and inputs that overlap the output in part."""
        tensor = self.tensors[name]
        attempts = [
            f"{name}.as_strided((2, 3), (0, 1), 0).{write}" for write in ("add_(1)", "mul_(2)", "neg_()")
        ]
        attempts += [f"{name}.view(-1)", f"{name}.as_strided((100,), (1,), 0)"]
        if storage_elements(tensor) > 3 and tensor.dtype != torch.int32:
            one, two = (f"{name}.as_strided((3,), (1,), {start})" for start in (0, 1))
            attempts += [
                f"{one}.add_({two})",
                f"{one}.copy_({two})",
                f"torch.add({two}, 1, out={one})",
                f"{name}.as_strided((1,), (1,), 0).expand(3).copy_({one})",
            ]
        if storage_elements(tensor) >= 3:
            self.run(f"seen.append(outcome(lambda: {choose.among(attempts)}))")

    def drop_or_look(self, name: str, choose: Choices) -> None:
        if choose.below(2) and len(self.tensors) > 2:
            self.run(f"del {name}")
        else:
            self.run(f"seen.append(({name}.tolist(), {name}._version))")


def storage_elements(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() // tensor.itemsize


def places(tensor: torch.Tensor) -> list[int]:
    return (
        torch.arange(storage_elements(tensor))
        .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        .flatten()
        .tolist()
    )


def shares_places_within(tensor: torch.Tensor) -> bool:
    return len(set(places(tensor))) < tensor.numel()


def largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0


# ---- tests -------------------------------------------------------------------------------------------------

SCRIPTS = {
    "a view sees a write to its base": ["r1 = r0[1]", "r0.add_(1)"],
    "a base sees a write through a transposed slice": ["r0[1:3].t().add_(1)"],
    "a base sees a write through a view of a view": ["r0.view(-1)[3:17].view(2, 7)[:, 1::2].mul_(3)"],
    "a value read before a write stays": ["r1 = r0 * 2", "r0.zero_()", "r2 = r0 + r1"],
    "a view read before and after a write": ["r1 = r0[:, 2]", "r2 = r1 + 0", "r1.fill_(9)", "r3 = r1 + 0"],
    "overlapping writes keep their order": ["r0[0:3].fill_(7)", "r0[2:4].fill_(8)", "r0[1:3, 2:4].fill_(9)"],
    "an expanded row follows its source": ["r1 = r0[:1].expand(3, -1)", "r0.add_(1)", "r2 = r1.clone()"],
    "elements are written one by one": ["r0[1, 2].add_(5)", "r0[3][4].fill_(7)", "r0[-1, -1] = 1"],
    "out= writes into a column": ["torch.add(r0[:, 0], r0[:, 1], out=r0[:, 2])"],
    "out= is resized": ["r1 = torch.empty(0, device=device)", "torch.add(r0, r0, out=r1)"],
    "rows are swapped through a copy": ["r1 = r0[0].clone()", "r0[0].copy_(r0[1])", "r0[1].copy_(r1)"],
    "a view outlives its base": ["r1 = r0[1]", "del r0", "r1.add_(1)"],
    "tensors in memory order of their own": ["r1 = r0.t()", "r1.mul_(2)", "r2 = r1.clone()", "r2.add_(r1)"],
    "an operation keeps the storage it read": ["r1 = r0 + 1", "r2 = r0 * 2", "r0.data = r2", "r0.add_(1)"],
    "set_ makes an alias": ["r1 = torch.zeros(2, device=device)", "r1.set_(r0)", "r1.add_(1)"],
    "resize_ keeps what fits": ["r1 = r0[0]", "r0.resize_(2, 3)", "r0.add_(1)"],
    "a freed storage grows again": [
        "r1 = r0 + 1",
        "r0.untyped_storage().resize_(0)",
        "r0.untyped_storage().resize_(96)",
        "r0.copy_(r1)",
    ],
    "overlapping windows are read": ["r1 = r0.view(-1).unfold(0, 6, 3)", "r0.add_(1)", "r2 = r1.clone()"],
    "the bytes of a float are an integer": ["r1 = r0.view(torch.int32)", "r0.fill_(1)", "r2 = r1.clone()"],
    "host reads in between": ["r0.add_(1)", "seen.append(r0.tolist())", "r0[1].mul_(2)"],
}


@pytest.mark.parametrize("mode", PROGRAMS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_every_alias_is_as_on_the_cpu_when(script, mode):
    lines = ["r0 = torch.arange(24.0).reshape(4, 6).to(device)", *SCRIPTS[script]]
    with eager_mode(mode):
        assert_same(lines, interpret(lines, DEVICE), interpret(lines, "cpu"))


@pytest.mark.parametrize("mode", PROGRAMS)
def test_random_programs_leave_every_alias_as_on_the_cpu(mode):
    codes = st.lists(st.integers(0, 2**48), min_size=4, max_size=14)

    @settings(max_examples=PROGRAMS[mode], deadline=None, database=None)
    @given(st.integers(0, len(FIRST_LINES) ** 2 - 1), codes)
    def run(first, codes):
        for value_set in range(VALUE_SETS):
            writer = ProgramWriter(first, codes, random.Random(value_set))
            with eager_mode(mode):
                actual = interpret(writer.lines, DEVICE)
                assert_same(writer.lines, actual, variables(writer.scope))

    run()


@pytest.mark.skipif(not HAS_TPU, reason="parts are the tpu device's")
def test_random_programs_that_repeat_leave_every_alias_as_on_the_cpu_in_parts():
    """Three times the same lines: equal stretches of the stream, which is cut between them."""
    codes = st.lists(st.integers(0, 2**48), min_size=16, max_size=30)

    @settings(max_examples=MANY or 25, deadline=None, database=None)
    @given(st.integers(0, len(FIRST_LINES) ** 2 - 1), codes)
    def run(first, codes):
        writer = ProgramWriter(first, codes, random.Random(0))
        lines = [line for line in writer.lines if "seen" not in line]  # which would cut the stream
        with torch.tpu.eager_mode("fused", parts="always"):
            all_actual = [interpret(lines, DEVICE) for _ in range(3)]
            for actual in all_actual:
                assert_same(lines, actual, interpret(lines, "cpu"))

    run()
