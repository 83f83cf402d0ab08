"""Views: reading and writing any view that PyTorch can make gives what PyTorch on the CPU gives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tpu_backend.views import Geometry, memory_order, read, resolve_on_host, slices, write

NUMPY_DTYPE = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int64: np.dtype(np.int64),
    torch.int16: np.dtype(np.int16),
    torch.uint8: np.dtype(np.uint8),
    torch.bool: np.dtype(np.bool_),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.complex64: np.dtype(np.complex64),
}
SHAPES = [(24,), (4, 6), (2, 3, 4), (5, 7), (23,), (3, 1, 5), (3, 4, 4), (2, 2, 3, 2), (1,), ()]
FIRST, LAST = 0, -1

# Chains are drawn as plain integers, which `Choices` decodes into one operation each: that is quick.
# A failure names its case, so nothing is shrunk: every attempt would compile again.
QUICK = settings(deadline=None, phases=[Phase.generate], database=None)
chains = st.tuples(st.integers(0, 9), st.lists(st.integers(0, 2**32), max_size=5), st.integers(0, 2**16))


@pytest.fixture(autouse=True, scope="module")
def _int64_in_jax() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


class Choices:
    """A stream of small decisions read off one integer."""

    def __init__(self, code: int) -> None:
        self.code = code

    def below(self, count: int) -> int:
        self.code, choice = divmod(self.code, count)
        return choice


# ---- PyTorch's side ----------------------------------------------------------------------------------------


def geometry_of(tensor: torch.Tensor) -> Geometry:
    dtype = NUMPY_DTYPE[tensor.dtype]
    return Geometry(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), dtype)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A copy in memory of its own."""
    if tensor.dtype == torch.bfloat16:
        return to_numpy(tensor.contiguous().view(torch.int16)).view(jnp.bfloat16)
    return np.array(tensor.resolve_conj().numpy())


def counting(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """1, 2, 3, ...: every element tells where it came from (booleans: every third is False)."""
    values = torch.arange(1, math.prod(shape) + 1)
    return (values % 3 if dtype == torch.bool else values).to(dtype).reshape(shape)


def as_strided(tensor: torch.Tensor, choose: Choices) -> torch.Tensor:
    room = tensor.untyped_storage().nbytes() // tensor.itemsize
    sizes = [1 + choose.below(4) for _ in range(choose.below(4))]
    strides = [choose.below(7) for _ in sizes]
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    return tensor.as_strided(sizes, strides, choose.below(room - extent + 1)) if extent <= room else tensor


def reshaped(tensor: torch.Tensor, choose: Choices) -> torch.Tensor:
    shapes = [[-1], [1, -1], [-1, 1], [2, -1], [-1, 3], [2, 2, -1], [tensor.numel()]]
    try:
        return tensor.view(shapes[choose.below(len(shapes))])
    except RuntimeError:  # not viewable in this shape
        return tensor


def retyped(tensor: torch.Tensor, choose: Choices) -> torch.Tensor:
    dtypes = list(NUMPY_DTYPE)
    try:
        return tensor.view(dtypes[choose.below(len(dtypes))])
    except RuntimeError:  # the strides do not allow it
        return tensor


def sliced(tensor: torch.Tensor, choose: Choices, max_step: int = 3) -> torch.Tensor:
    dim = choose.below(tensor.dim())
    start = choose.below(tensor.shape[dim] + 1)
    stop = start + choose.below(tensor.shape[dim] - start + 1)
    index = (slice(start, stop or None, 1 + choose.below(max_step)),)
    return tensor[(slice(None),) * dim + index]


def basic_view(tensor: torch.Tensor, choose: Choices, max_step: int = 1) -> torch.Tensor:
    """One operation of basic indexing; the tensor itself where the drawn one does not fit."""
    if tensor.dim() == 0:
        return tensor.unsqueeze(0)
    operation, dim = choose.below(6), choose.below(tensor.dim())
    size = tensor.shape[dim]
    if operation == 0:
        return tensor.transpose(dim, choose.below(tensor.dim()))
    if operation == 1 and size > 0:
        return tensor.select(dim, choose.below(size))
    if operation == 2:
        return sliced(tensor, choose, max_step)
    if operation == 3:
        dims = list(range(tensor.dim()))
        return tensor.permute(dims[dim:] + dims[:dim])
    if operation == 4 and size == 1:
        return tensor.expand([2 + choose.below(2) if d == dim else -1 for d in range(tensor.dim())])
    if operation == 5:
        return tensor.unsqueeze(dim)
    return tensor


def any_view(tensor: torch.Tensor, choose: Choices, dtypes: bool = False) -> torch.Tensor:
    """One random view operation; the tensor itself where the drawn one does not fit."""
    operation = choose.below(9 if dtypes else 7)
    if operation == 0:
        return reshaped(tensor, choose)
    if operation == 1:
        return as_strided(tensor, choose)
    if operation == 2 and 0 < tensor.dim() < 4 and tensor.shape[LAST] > 0:
        return tensor.unfold(LAST, 1 + choose.below(tensor.shape[LAST]), 1 + choose.below(3))
    if operation == 3 and tensor.dim() > 1:
        return tensor.diagonal(choose.below(3) - 1, FIRST, LAST)
    if operation >= 7:
        return retyped(tensor, choose)
    return basic_view(tensor, choose, max_step=3)


# ---- both sides --------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A view, what must be read through it, and what the base must be after a write through it."""

    base: np.ndarray
    geometry: Geometry
    moved: int  # another offset of the same geometry, with the same answer from `slices`
    value: np.ndarray
    reads: list[np.ndarray]  # at geometry.offset, at moved
    writes: list[np.ndarray]


def make_case(base: torch.Tensor, view: torch.Tensor, seed: int) -> Case:
    geometry = geometry_of(view)
    room = base.untyped_storage().nbytes() // view.itemsize - geometry.extent
    moved = geometry.offset
    if geometry.numel and slices(base.shape, replace(geometry, offset=seed % (room + 1))) == slices(
        base.shape, geometry
    ):
        moved = seed % (room + 1)
    value = (
        -counting(view.shape).to(view.dtype)
        if view.dtype != torch.bool
        else ~counting(view.shape, torch.bool)
    )
    case = Case(to_numpy(base), geometry, moved, to_numpy(value), [], [])
    for offset in (geometry.offset, moved):
        written = base.clone(memory_format=torch.contiguous_format)
        elements = written.view(-1) if view.dtype == base.dtype else whole_storage(written, view.dtype)
        target = elements.as_strided(view.shape, view.stride(), offset)
        case.reads.append(to_numpy(target))
        store(elements, target, value)
        case.writes.append(to_numpy(written))
    return case


def whole_storage(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage())


def store(elements: torch.Tensor, target: torch.Tensor, value: torch.Tensor) -> None:
    """``target.copy_(value)``; in row-major order where elements share a place, which PyTorch leaves open."""
    places = torch.arange(elements.numel()).as_strided(target.shape, target.stride(), target.storage_offset())
    if len(places.unique()) == places.numel():
        target.copy_(value)
        return
    for place, element in zip(places.flatten().tolist(), value.flatten()):
        elements[place] = element


def run(cases: list[Case]) -> None:
    """All reads and writes of all cases in one XLA program (compiling takes the time), compared exactly."""

    def program(bases, values, offsets):
        return [
            (
                read(base, case.geometry),
                read(base, case.geometry, offset),
                write(base, case.geometry, value),
                write(base, case.geometry, value, offset),
            )
            for case, base, value, offset in zip(cases, bases, values, offsets)
        ]

    offsets = [np.int64(case.moved) for case in cases]
    results = jax.jit(program)([case.base for case in cases], [case.value for case in cases], offsets)
    for case, (at_home, moved, written, written_moved) in zip(cases, results):
        assert_same(at_home, case.reads[0], case)
        assert_same(moved, case.reads[1], case)
        assert_same(written, case.writes[0], case)
        assert_same(written_moved, case.writes[1], case)
        assert_same(resolve_on_host(case.base, case.geometry), case.reads[0], case)


def assert_same(got: jax.Array | np.ndarray, expected: np.ndarray, case: Case) -> None:
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    same = got.tobytes() == expected.tobytes()
    assert same, f"{case.geometry} moved to {case.moved} over {case.base.shape}:\n{got}\nnot\n{expected}"


# ---- values ------------------------------------------------------------------------------------------------


@settings(QUICK, max_examples=40)
@given(st.lists(chains, min_size=40, max_size=40))
def test_reads_and_writes_equal_pytorch(drawn):
    cases = []
    for shape, codes, seed in drawn:
        base = view = counting(SHAPES[shape])
        for code in codes:
            view = any_view(view, Choices(code))
        cases.append(make_case(base, view, seed))
    run(cases)


@settings(QUICK, max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 7), chains), min_size=25, max_size=25))
def test_views_of_another_dtype_equal_pytorch(drawn):
    cases = []
    for dtype, (shape, codes, seed) in drawn:
        base = view = counting(SHAPES[shape], list(NUMPY_DTYPE)[dtype])
        for code in codes:
            view = any_view(view, Choices(code), dtypes=True)
        if (base.dtype == torch.bool) == (
            view.dtype == torch.bool
        ):  # other bytes than 0 and 1 have no place in bool
            cases.append(make_case(base, view, seed))
    run(cases)
