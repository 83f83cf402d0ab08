"""Aliasing: programs of views, in-place writes and ``out=`` leave every alias as they do on the CPU, exactly.

A program is a list of Python lines over tensors r0, r1, ...  A random one is written while it runs on the CPU
(which tells what is valid and what must come out) and then run line by line on the device.  A failure prints
it, ready to be pasted.

Values are small integers, so float32 is exact and a fused multiply-add rounds nothing.  Each program runs
with a few sets of runtime values (starts of slices, scalars) that share its shapes: a compiled program takes
those as inputs.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backend.choices import Choices

HAS_TPU = hasattr(torch, "tpu") and torch.tpu.is_available()
DEVICE = "tpu" if HAS_TPU else "cpu"
# Random programs a mode: each fused one is compiled as a whole, the others share what is compiled for an op.
PROGRAMS = {"debug": 200, "strict": 600, "fused": 200} if HAS_TPU else {"native": 1000}
VALUE_SETS = 3
LARGEST = 2**20  # float32 counts exactly to 2**24
MOST_ELEMENTS = 48
MOST_TENSORS = 8

FIRST_LINES = [
    "torch.arange(24.0).reshape(4, 6).to(device)",
    "torch.arange(24).reshape(2, 3, 4).to(device)",
    "torch.arange(24.0).reshape(6, 4).to(device).t()",
    "torch.arange(24).to(device)",
    "torch.zeros(2, 3, 4, device=device)",
]


def eager_mode(mode: str) -> contextlib.AbstractContextManager[Any]:
    return torch.tpu.eager_mode(mode) if HAS_TPU else contextlib.nullcontext()


def interpret(lines: Sequence[str], device: str) -> dict[str, Any]:
    """Run a program; returns its variables: tensors by name, and `seen`, what it read in between."""
    scope: dict[str, Any] = {"torch": torch, "device": device, "seen": []}
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
        for trait in ("dtype", "shape", "stride", "storage_offset"):
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
        self.scope: dict[str, Any] = {"torch": torch, "device": "cpu", "seen": []}
        self.names = (f"r{i}" for i in itertools.count())
        self.make(FIRST_LINES[first % len(FIRST_LINES)])
        self.make(FIRST_LINES[first // len(FIRST_LINES) % len(FIRST_LINES)])
        for code in codes:
            self.add_line(Choices(code))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.scope.items() if isinstance(value, torch.Tensor)}

    def run(self, line: str) -> None:
        exec(line, self.scope)
        self.lines.append(line)

    def make(self, expression: str) -> None:
        self.run(f"{next(self.names)} = {expression}")

    def add_line(self, choose: Choices) -> None:
        kind = choose.below(12)
        name = choose.among(list(self.tensors))
        if kind < 5:
            self.view(name, choose)
        elif kind < 9:
            self.write(name, choose)
        elif kind < 10:
            self.compute(name, choose)
        elif kind < 11:
            self.change_storage(name, choose)
        else:
            self.drop_or_look(name, choose)

    # -- views: a new name for the same memory

    def view(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        if len(self.tensors) >= MOST_TENSORS:
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
        self.make(choose.among(views))

    # -- writes: in place and out=

    def write(self, name: str, choose: Choices) -> None:
        tensor = self.tensors[name]
        if shares_places_within(tensor):
            return  # PyTorch refuses some of these and leaves the rest open
        number = self.runtime.choice([-3, -2, 2, 3, 5])
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
        if max(largest(tensor), largest(a), largest(b)) * 6 >= LARGEST:
            return []
        return lines

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
        elements = tensor.untyped_storage().nbytes() // tensor.itemsize
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
            changes += [f"{name}.data = {choose.among(peers)}", f"{name}.set_({choose.among(peers)})"]
        self.run(choose.among(changes))

    def drop_or_look(self, name: str, choose: Choices) -> None:
        if choose.below(2) and len(self.tensors) > 2:
            self.run(f"del {name}")
        else:
            self.run(f"seen.append({name}.tolist())")


def places(tensor: torch.Tensor) -> list[int]:
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return (
        torch.arange(elements)
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
    codes = st.lists(st.integers(0, 2**48), min_size=3, max_size=9)

    @settings(max_examples=PROGRAMS[mode], deadline=None, database=None)
    @given(st.integers(0, len(FIRST_LINES) ** 2 - 1), codes)
    def run(first, codes):
        for value_set in range(VALUE_SETS):
            writer = ProgramWriter(first, codes, random.Random(value_set))
            with eager_mode(mode):
                actual = interpret(writer.lines, DEVICE)
                assert_same(writer.lines, actual, variables(writer.scope))

    run()
