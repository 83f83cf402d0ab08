"""Views: reading and writing any view that PyTorch can make gives what PyTorch on the CPU gives."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.backend.choices import Choices
from tests.backend.quick_xla import quick_xla
from tpu_backend import _C
from tpu_backend.views import Geometry, read, write

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


# ---- PyTorch's side ----------------------------------------------------------------------------------------


def geometry_of(tensor: torch.Tensor, base: torch.Tensor, offset: int | None = None) -> Geometry:
    """As the recorder says it; at another offset where one is given."""
    sizes, strides = tuple(tensor.shape), tuple(tensor.stride())
    offset = tensor.storage_offset() if offset is None else offset
    is_box = tensor.dtype == base.dtype and _C.is_box(base.shape, sizes, strides, offset)
    return Geometry(sizes, strides, offset, NUMPY_DTYPE[tensor.dtype], is_box)


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
        return tensor.view(choose.among(shapes))
    except RuntimeError:  # not viewable in this shape
        return tensor


def retyped(tensor: torch.Tensor, choose: Choices) -> torch.Tensor:
    try:
        return tensor.view(choose.among(list(NUMPY_DTYPE)))
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
    moved: int  # another offset of the same geometry, with the same `is_box`
    value: np.ndarray
    reads: list[np.ndarray]  # at geometry.offset, at moved
    writes: list[np.ndarray]


def make_case(base: torch.Tensor, view: torch.Tensor, seed: int) -> Case:
    geometry = geometry_of(view, base)
    room = base.untyped_storage().nbytes() // view.itemsize - geometry.extent
    moved = geometry.offset
    if geometry.numel and geometry_of(view, base, seed % (room + 1)).is_box == geometry.is_box:
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

    arguments = (
        [case.base for case in cases],
        [case.value for case in cases],
        [np.int64(case.moved) for case in cases],
    )
    results = jax.jit(program, compiler_options=quick_xla())(*arguments)
    for case, (at_home, moved, written, written_moved) in zip(cases, results):
        assert_same(at_home, case.reads[0], case)
        assert_same(moved, case.reads[1], case)
        assert_same(written, case.writes[0], case)
        assert_same(written_moved, case.writes[1], case)


def assert_same(got: jax.Array | np.ndarray, expected: np.ndarray, case: Case) -> None:
    got = np.asarray(got)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    same = got.tobytes() == expected.tobytes()
    assert same, f"{case.geometry} moved to {case.moved} over {case.base.shape}:\n{got}\nnot\n{expected}"


# ---- values ------------------------------------------------------------------------------------------------


@settings(QUICK, max_examples=12)
@given(st.lists(chains, min_size=100, max_size=100))
def test_reads_and_writes_equal_pytorch(drawn):
    cases = []
    for shape, codes, seed in drawn:
        base = view = counting(SHAPES[shape])
        for code in codes:
            view = any_view(view, Choices(code))
        cases.append(make_case(base, view, seed))
    run(cases)


@settings(QUICK, max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 7), chains), min_size=40, max_size=40))
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


def test_a_base_with_flat_bytes_holds_any_dtype():
    """A storage that began as bytes: some floats at its start, one byte left over at its end."""
    storage = torch.arange(15, dtype=torch.uint8)
    view = storage[:12].view(torch.float32).view(3, 1)
    run([make_case(storage, view, 0), make_case(storage, storage[8:12].view(torch.int16), 1)])


def test_bytes_beside_a_bool_view_keep_their_values():
    base = np.array([5, 6, 7], np.uint8)
    geometry = Geometry((1,), (1,), 1, np.dtype(np.bool_))
    assert np.asarray(write(base, geometry, jnp.array([True]))).tolist() == [5, 1, 7]


def test_views_without_elements_read_nothing_and_write_nothing():
    base = jnp.arange(6.0).reshape(2, 3)
    geometry = Geometry((0, 3), (3, 1), 6, base.dtype)
    assert read(base, geometry).shape == (0, 3)
    assert write(base, geometry, jnp.zeros((0, 3))) is base
    empty = Geometry((2, 0), (1, 1), 0, base.dtype)
    assert read(jnp.zeros((0,)), empty).shape == (2, 0)


# ---- structure ---------------------------------------------------------------------------------------------


def operations(
    function, base: torch.Tensor, geometry: Geometry, *, traced: bool
) -> list[jax.extend.core.JaxprEqn]:
    """What `read` or `write` traces to, without the arithmetic on a runtime offset."""
    value = [jax.ShapeDtypeStruct(geometry.sizes, geometry.dtype)] if function is write else []
    offset = [jax.ShapeDtypeStruct((), np.int64)] if traced else []

    def traced_function(base, *rest):
        given_value, given_offset = rest[: len(value)], rest[len(value) :]
        return function(base, geometry, *given_value, *given_offset)

    jaxpr = jax.make_jaxpr(traced_function)(to_numpy(base), *value, *offset).jaxpr
    return [
        eqn for eqn in jaxpr.eqns if eqn.outvars[0].aval.shape or eqn.primitive.name not in ("div", "rem")
    ]


def names(function, base: torch.Tensor, view: torch.Tensor, *, traced: bool = False) -> list[str]:
    return [eqn.primitive.name for eqn in operations(function, base, geometry_of(view, base), traced=traced)]


@pytest.mark.parametrize("traced", [False, True])
def test_the_whole_base_is_read_and_written_by_no_operation(traced):
    base = counting((2, 3, 4))
    assert names(read, base, base, traced=traced) == []
    assert names(write, base, base, traced=traced) == []


@pytest.mark.parametrize("traced", [False, True])
def test_a_transposed_base_is_one_transpose(traced):
    base = counting((4, 6))
    assert names(read, base, base.t(), traced=traced) == ["transpose"]
    assert names(write, base, base.t(), traced=traced) == ["transpose"]


@pytest.mark.parametrize("traced", [False, True])
def test_a_view_of_another_shape_is_one_reshape(traced):
    base = counting((2, 3, 4))
    assert names(read, base, base.view(6, 4), traced=traced) == ["reshape"]
    assert names(read, base, base.view(3, 8), traced=traced) == ["reshape"]


def test_an_index_is_a_slice_of_the_first_dim():
    base = counting((5, 3, 4))
    assert names(read, base, base[2]) == ["slice", "reshape"]
    assert names(read, base, base[2], traced=True) == ["dynamic_slice", "reshape"]
    assert names(write, base, base[2], traced=True) == ["reshape", "dynamic_update_slice"]


def test_an_expanded_row_is_a_slice_and_a_broadcast():
    base = counting((5, 4))
    assert names(read, base, base[1].expand(3, 4)) == ["slice", "reshape", "broadcast_in_dim"]


def test_chunks_of_a_packed_projection_are_slices():
    base = counting((2, 3, 12))
    for chunk in base.chunk(3, dim=-1):
        assert names(read, base, chunk) == ["slice"]
        assert names(read, base, chunk, traced=True) == ["dynamic_slice"]
        assert names(write, base, chunk, traced=True) == ["dynamic_update_slice"]


def test_halves_of_heads_are_cut_from_the_heads():
    """As rotary embeddings have them: else a TPU copies the product that they are cut from."""
    product = counting((6, 40))  # 2 rows of 3 tokens; 5 heads of 8 features
    heads = product.view(2, 3, 5, 8).transpose(1, 2)
    assert names(read, product, heads) == ["reshape", "transpose"]
    for half in heads.chunk(2, dim=-1):
        assert names(read, product, half) == ["reshape", "transpose", "slice"]
    # Of a small part no more is laid out than that.
    repeated = heads[..., :3].unsqueeze(-1).expand(2, 5, 3, 3, 4)
    assert names(read, product, repeated)[:2] == ["reshape", "slice"]
    assert names(read, product, heads[..., :3]) == ["reshape", "slice", "reshape", "transpose"]


def test_a_strided_slice_is_one_slice_also_where_the_step_does_not_divide():
    base = counting((5, 7))
    assert names(read, base, base[1::2, ::3]) == ["slice"]
    assert "scatter" not in names(write, base, base[1::2, ::3])


def test_a_parameter_in_a_flat_buffer_is_one_slice_and_a_reshape():
    base = counting((101,))
    parameter = base[13:25].view(3, 4)
    assert names(read, base, parameter) == ["slice", "reshape"]
    assert names(read, base, parameter, traced=True) == ["dynamic_slice", "reshape"]


def test_every_index_shares_one_program():
    base = counting((10, 3, 4))
    programs = {str(operations(read, base, geometry_of(base[i], base), traced=True)) for i in range(10)}
    assert len(programs) == 1


@settings(max_examples=600, deadline=None, database=None)
@given(chains)
def test_basic_indexing_never_gathers(chain):
    shape, codes, _ = chain
    base = view = counting(SHAPES[shape])
    for code in codes:
        choose = Choices(code)
        view = reshaped(view, choose) if choose.below(5) == 4 else basic_view(view, choose)
    for traced in (False, True):
        assert "gather" not in names(read, base, view, traced=traced)
        assert not {"gather", "scatter", "scatter-max"} & set(names(write, base, view, traced=traced))


@pytest.mark.parametrize("max_step", [1, 3])
@settings(max_examples=500, deadline=None, database=None)
@given(chain=chains)
def test_slices_are_cut_out_of_the_base_as_it_is(chain, max_step):
    """Slicing along the dims of the base, with any step, never flattens it first: that is a copy on a TPU."""
    shape, codes, _ = chain
    base = view = counting(SHAPES[shape])
    for code in codes:
        view = basic_view(view, Choices(code), max_step=max_step)
    for traced in (False, True):
        for equation in operations(read, base, geometry_of(view, base), traced=traced):
            if equation.primitive.name in ("slice", "dynamic_slice"):
                # A step may divide a dim of the base; dims of size 1 may be left out.
                dims = equation.invars[0].aval.shape
                assert len(dims) >= sum(size > 1 for size in base.shape)
                assert max_step > 1 or len(dims) <= base.dim()


def test_a_step_divides_a_dim_and_a_slice_of_it_joins_none() -> None:
    base = counting((3, 4, 4))
    found = operations(read, base, geometry_of(base[:, ::2], base), traced=False)
    (equation,) = (each for each in found if each.primitive.name == "slice")
    assert equation.invars[0].aval.shape == (3, 2, 2, 4)


# ---- the recorder's predicate ------------------------------------------------------------------------------

SLICES = [
    # base dims, sizes, strides, offset, slices?
    ((), (), (), 0, True),
    ((4, 6), (4, 6), (6, 1), 0, True),
    ((4, 6), (6, 4), (1, 6), 0, True),
    ((4, 6), (24,), (1,), 0, True),
    ((4, 6), (2, 6), (6, 1), 12, True),
    ((4, 6), (2, 6), (6, 1), 13, False),  # straddles rows
    ((4, 6), (5,), (1,), 13, True),
    ((4, 6), (5,), (1,), 14, False),
    ((4, 6), (4, 3), (6, 2), 1, True),  # x[:, 1::2]
    ((4, 6), (4, 3), (6, 2), 2, False),
    ((5, 7), (3, 3), (14, 3), 0, True),  # x[::2, ::3]
    ((4, 6), (4,), (7,), 0, True),  # the diagonal, of the flattened base
    ((3, 4, 4), (3, 4), (16, 5), 0, True),  # a batch of diagonals
    ((2, 3, 4), (3, 4), (4, 1), 12, True),
    ((2, 3, 4), (3, 4), (4, 1), 8, False),
    ((2, 3, 4), (2, 3, 4, 5), (12, 4, 1, 0), 0, True),
    ((24,), (4, 4), (6, 1), 2, True),
    ((24,), (4, 4), (6, 1), 3, False),
    ((25,), (4, 4), (6, 1), 0, False),  # 6 does not divide 25
    ((24,), (8, 3), (2, 1), 0, False),  # overlapping windows
    ((3, 1, 5), (3, 1, 5), (5, 77, 1), 0, True),  # strides of size-1 dims mean nothing
    ((4, 6), (0, 6), (6, 1), 24, True),
]


@pytest.mark.parametrize(("base_dims", "sizes", "strides", "offset", "expected"), SLICES)
def test_slices(base_dims, sizes, strides, offset, expected):
    assert _C.is_box(base_dims, sizes, strides, offset) is expected


# ---- memory order and errors -------------------------------------------------------------------------------


def test_memory_order_of_a_contiguous_tensor_is_the_identity():
    for shape in [(), (3,), (2, 3, 4), (2, 1, 3), (1, 1), (0, 3)]:
        assert _C.memory_order(shape, torch.empty(shape).stride()) == tuple(range(len(shape)))


def test_memory_order_makes_any_permuted_tensor_contiguous():
    for shape in [(2, 3, 4), (2, 1, 3), (1, 5, 1), (2, 3, 1, 4)]:
        for dims in itertools.permutations(range(len(shape))):
            tensor = torch.empty(shape).permute(dims)
            order = _C.memory_order(tensor.shape, tensor.stride())
            assert order is not None
            assert tensor.permute(order).is_contiguous()


def test_memory_order_of_channels_last():
    tensor = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert _C.memory_order(tensor.shape, tensor.stride()) == (0, 2, 3, 1)


def test_memory_order_refuses_gaps_and_overlap():
    base = torch.empty(4, 6)
    for view in [base[:, ::2], base[:, 1:], base[:1].expand(3, 6), base.view(-1).unfold(0, 3, 1)]:
        assert _C.memory_order(view.shape, view.stride()) is None


sizes_and_order = st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=5).flatmap(
    lambda sizes: st.tuples(st.just(sizes), st.permutations(range(len(sizes))), st.integers(0, 4))
)


def strided(sizes: Sequence[int], order: Sequence[int], stride_of_ones: int) -> list[int]:
    """Strides of a tensor whose dims lie in this order in memory; those of dims of size 1 say nothing."""
    strides, step = [stride_of_ones] * len(sizes), 1
    for dim in reversed(order):
        if sizes[dim] != 1:
            strides[dim] = step
            step *= max(sizes[dim], 1)
    return strides


@settings(QUICK, max_examples=500)
@given(sizes_and_order, st.booleans())
def test_the_memory_order_of_a_dense_tensor_is_found_whatever_its_dims_of_size_1(drawn, is_dense):
    sizes, order, stride_of_ones = drawn
    strides = strided(sizes, order, stride_of_ones)
    if not is_dense:  # gaps, or overlap
        strides = [stride * 2 if place % 2 else stride for place, stride in enumerate(strides)]
    found = _C.memory_order(sizes, strides)
    assert found is not None or not is_dense
    if found is not None and 0 not in sizes:
        tensor = torch.empty_strided(sizes, strides)
        assert tensor.permute(found).is_contiguous()


def array_of(tensor: torch.Tensor) -> jax.Array:
    torch.tpu.flush()
    return _C.lease_array(tensor)


@settings(QUICK, max_examples=25)
@given(sizes_and_order)
def test_a_value_has_the_shape_of_its_layout(drawn):
    """However dims of size 1 are strided: new tensors, results, writes in place and what the host sends."""
    sizes, order, stride_of_ones = drawn
    strides = strided(sizes, order, stride_of_ones)
    host = torch.empty_strided(sizes, strides).copy_(torch.arange(math.prod(sizes)).reshape(sizes))
    made = torch.empty_strided(sizes, strides, device="tpu")
    made.copy_(host)
    moved = host.to("tpu")
    written = torch.empty_strided(sizes, strides, device="tpu").fill_(1.0).mul_(2.0)
    results = {
        "made": made,
        "moved": moved,
        "written": written,
        "computed": moved + 1,
        "cloned": made.clone(),
    }
    newest_first = [tuple(dims) for _, _, dims, _ in _C.live_buffers(0)]
    for (name, tensor), dims in zip(results.items(), newest_first[: len(results)][::-1], strict=True):
        if tensor.numel() > 0:
            assert array_of(tensor).shape == dims, name
    assert torch.equal(made.cpu(), host)
    assert torch.equal(results["computed"].cpu(), host + 1)
    assert host.numel() == 0 or results["computed"].stride() == (host + 1).stride()


@pytest.mark.parametrize(
    ("sizes", "strides"),
    [((4, 1, 6), (1, 1, 4)), ((1, 5, 3), (1, 1, 5)), ((3, 2, 1, 4), (1, 3, 1, 6)), ((2, 3), (3, 1))],
)
def test_a_write_in_place_takes_the_memory_whatever_the_strides_of_dims_of_size_1(
    sizes, strides, monkeypatch
):
    from tpu_backend.runtime import compiler

    texts = []
    original = compiler.lower_segment

    def spy(description, sharding):
        lowered, bounds_checks = original(description, sharding)
        texts.append(lowered.as_text())
        return lowered, bounds_checks

    host = torch.empty_strided(sizes, strides).fill_(1.0)
    x = host.to("tpu")
    assert x.stride() == host.stride()
    torch.tpu.flush()
    monkeypatch.setattr(compiler, "lower_segment", spy)
    x.hypot_(x + 1)  # a program that no other test compiles
    x.atan_()
    torch.tpu.flush()
    (text,) = texts
    assert text.count("tf.aliasing_output") == 1
    torch.testing.assert_close(x.cpu(), host.hypot(host + 1).atan())


def test_a_view_past_the_end_of_its_storage_is_named():
    with pytest.raises(ValueError, match=r"offset 2 reaches element 6, its storage holds 6 of float32"):
        read(jnp.zeros(6, jnp.float32), Geometry((5,), (1,), 2, np.dtype(np.float32)))


def test_a_value_that_does_not_match_its_view_is_named():
    with pytest.raises(ValueError, match=r"the value is float32\[4\], the view is float32\[2\]"):
        write(
            jnp.zeros(6, jnp.float32),
            Geometry((2,), (1,), 0, np.dtype(np.float32)),
            jnp.zeros(4, jnp.float32),
        )
