"""Operators whose output shapes depend on data: as on the CPU, one read a call, few programs."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

pytestmark = pytest.mark.usefixtures("no_fallback")

T = torch.tensor
aten = torch.ops.aten

TABLE = torch.arange(12.0).reshape(3, 4)
ROWS, COLUMNS = T([True, False, True]), T([True, False, True, True])
ODD = TABLE % 2 > 0
NAN = float("nan")


class Moved:
    compilations = host_reads = 0


@contextmanager
def counted() -> Iterator[Moved]:
    torch.tpu.flush()
    before, moved = torch.tpu.compile_stats(), Moved()
    yield moved
    torch.tpu.flush()
    after = torch.tpu.compile_stats()
    moved.compilations = after["compilations"] - before["compilations"]
    moved.host_reads = after["host_reads"] - before["host_reads"]


def assert_same(results: Any, expected: Any) -> None:
    """Values (NaN equals NaN), shapes, dtypes and strides."""
    for ours, theirs in zip(tree_leaves(results), tree_leaves(expected), strict=True):
        assert ours.is_tpu
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


def check(function: Callable[..., Any], *inputs: torch.Tensor, reads: int) -> None:
    """The same call on the CPU and on the device, which is read `reads` times."""
    expected = function(*(tensor.clone() for tensor in inputs))
    on_device = [tensor.clone().to("tpu") for tensor in inputs]
    with counted() as moved:
        results = function(*on_device)
    assert moved.host_reads == reads
    assert_same(results, expected)


def gradient(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The gradient of a weighted sum of the results, by the first argument."""

    def run(leaf: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        leaf.requires_grad_()
        result = function(leaf, *rest)
        weights = torch.arange(1.0, result.numel() + 1, device=leaf.device).reshape(result.shape)
        return torch.autograd.grad((result * weights).sum(), leaf)[0]

    return run


# ---- masks -------------------------------------------------------------------------------------------------


def nonzero_out(values: torch.Tensor) -> torch.Tensor:
    return torch.nonzero(values, out=torch.empty(0, dtype=torch.int64, device=values.device))


def select_out(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.masked_select(values, mask, out=values.new_empty(0))


MASKED = {
    "nonzero": (torch.nonzero, ODD),
    "nonzero 0-d": (torch.nonzero, T(3.0)),
    "nonzero out": (nonzero_out, ODD),
    "nonzero 3-d": (torch.nonzero, torch.arange(60).reshape(3, 4, 5) % 3),
    "as_tuple": (lambda x: torch.nonzero(x, as_tuple=True), ODD),
    "argwhere": (torch.argwhere, ODD),
    "where": (torch.where, ODD),
    "combinations": (torch.combinations, torch.arange(4)),
    "select": (torch.masked_select, TABLE, ODD),
    "select 0-d": (torch.masked_select, T(3.0), T(True)),
    "select broadcast": (torch.masked_select, TABLE, COLUMNS),
    "select of one": (torch.masked_select, T([5.0]), ODD),
    "select of a view": (lambda x, m: torch.masked_select(x.t(), m.t()), TABLE, ODD),
    "select out": (select_out, TABLE, ODD),
    "select no element": (torch.masked_select, TABLE, TABLE < 0),
    "index": (lambda x, m: x[m], TABLE, ODD),
    "index rows": (lambda x, m: x[m], TABLE, ROWS),
    "index columns": (lambda x, m: x[:, m], TABLE, COLUMNS),
    "index columns of a view": (lambda x, m: x.t()[:, m], TABLE, ROWS),
    "index middle": (lambda x, m: x[:, m], torch.arange(60).reshape(3, 4, 5), COLUMNS),
    "index rows of a view": (lambda x, m: x.t()[m], TABLE, COLUMNS),
    "index last two": (lambda x, m: x[:, m], torch.arange(24).reshape(2, 3, 4), ODD),
    "index two masks": (lambda x, m, n: x[m][:1][:, n][0], TABLE, ROWS, COLUMNS),
    "index mask and one": (lambda x, m: x[m, T([2])], TABLE, ROWS),
    "index mask and positions": (lambda x, m: x[m, T([1, 2])], TABLE, ROWS),
    "index mask and grid": (lambda x, m: x[m, T([[1], [2]])], TABLE, ROWS),
    "index masks together": (lambda x, m, n: x[m, n], TABLE, ROWS, T([True, False, True, False])),
    "index masks, one of one": (lambda x, m, n: x[m, n], TABLE, T([False, True, False]), COLUMNS),
    "index 0-d": (lambda x, m: x[m], TABLE, T(True)),
    "index out": (lambda x, m: aten.index.Tensor_out(x, [m], out=x.new_empty(0)), TABLE, ROWS),
}


@pytest.mark.parametrize("case", MASKED)
def test_masks_select_as_on_the_cpu_with_one_read(case: str) -> None:
    function, *inputs = MASKED[case]
    # Since torch 2.14, which has bcomplex32, combinations selects by no mask; before, by two.
    reads = {"index two masks": 2, "combinations": 0 if hasattr(torch, "bcomplex32") else 2}
    check(function, *inputs, reads=reads.get(case, 1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64])
def test_masks_and_what_they_select_are_of_any_dtype(dtype: torch.dtype) -> None:
    values = (torch.arange(24).reshape(2, 3, 4) % 3).to(dtype)
    check(torch.nonzero, values, reads=1)
    check(lambda x, m: x[:, m], values, ROWS, reads=1)
    check(torch.masked_select, values, values != 0, reads=1)


def test_tensors_without_elements_are_not_read() -> None:
    for shape in ((0,), (0, 3), (3, 0), (0, 0)):
        empty = torch.empty(shape)
        check(torch.nonzero, empty, reads=0)
        check(torch.masked_select, empty, empty > 0, reads=0)
        check(lambda x: torch.unique(x, return_inverse=True, return_counts=True), empty, reads=0)
    check(lambda x, m: x[m], TABLE[:, :0], ROWS, reads=1)  # how many rows, of no element each
    check(torch.bincount, torch.empty(0, dtype=torch.int64), reads=0)
    check(torch.repeat_interleave, torch.empty(0, dtype=torch.int64), reads=0)


def test_a_static_number_of_positions_is_not_read() -> None:
    for values in (ODD, T(3.0), torch.empty(0, 2)):
        check(lambda x: torch.nonzero_static(x, size=9), values, reads=0)
        check(lambda x: torch.nonzero_static(x, size=2, fill_value=7), values, reads=0)
    out = torch.empty(0, dtype=torch.int64, device="tpu")
    assert_same(torch.nonzero_static(ODD.to("tpu"), size=9, out=out), torch.nonzero_static(ODD, size=9))


def test_a_mask_on_the_host_is_counted_there() -> None:
    device = TABLE.to("tpu")
    with counted() as moved:
        selected = device[ROWS]
    assert moved.host_reads == 0
    assert_same(selected, TABLE[ROWS])


def test_a_uint8_mask_is_a_mask_and_deprecated() -> None:
    with pytest.warns(UserWarning, match="indexing with dtype torch.uint8 is now deprecated"):
        assert_same(TABLE.to("tpu")[ROWS.to(torch.uint8).to("tpu")], TABLE[ROWS])


@pytest.mark.parametrize("case", ["select", "index", "index columns", "index mask and positions"])
def test_gradients_reach_what_was_selected_without_another_read(case: str) -> None:
    function, *inputs = MASKED[case]
    check(gradient(function), *inputs, reads=1)


# ---- writes through masks ----------------------------------------------------------------------------------


def put(*indices: Any, accumulate: bool = False) -> Callable[..., torch.Tensor]:
    """``index_put_`` at indices where a number stands for an argument that is a mask."""

    def run(target: torch.Tensor, values: torch.Tensor, *masks: torch.Tensor) -> torch.Tensor:
        chosen = [
            masks[i] if isinstance(i, int) else i if i is None else i.to(target.device) for i in indices
        ]
        return aten.index_put_(target, chosen, values, accumulate)

    return run


LAST = T([False, False, True, True])
PUTS: dict[str, tuple[tuple[Any, ...], tuple[torch.Tensor, ...]]] = {
    "a number": ((0,), (TABLE, T(5.0), ODD)),
    "a number of another dtype": ((0,), (TABLE, T(5), ODD)),
    "a row for all": ((0,), (TABLE, torch.arange(4.0), ROWS)),
    "a number a row": ((0,), (TABLE, T([[1.0], [2.0]]), ROWS)),
    "a row each": ((0,), (TABLE, torch.arange(8.0).reshape(2, 4), ROWS)),
    "an element each": ((0,), (TABLE, torch.arange(6.0), ODD)),
    "columns": ((None, 0), (TABLE, torch.arange(9.0).reshape(3, 3), COLUMNS)),
    "the same columns": ((None, 0), (TABLE, torch.arange(3.0), COLUMNS)),
    "nothing": ((0,), (TABLE, torch.empty(0, 4), ROWS & False)),
    "two masks": ((0, 1), (TABLE, torch.arange(2.0), ROWS, LAST)),
    "two masks, one of one": ((0, 1), (TABLE, torch.arange(3.0), T([False, True, False]), COLUMNS)),
    "two masks, none": ((0, 1), (TABLE, T(1.0), ROWS & False, LAST & False)),
    "mask and positions": ((0, T([1, 2])), (TABLE, torch.arange(2.0), ROWS)),
    "mask and one": ((0, T([1])), (TABLE, T(7.0), ROWS)),
    "mask and grid": ((0, T([[1], [2]])), (TABLE, torch.arange(2.0), ROWS)),
    "positions and mask": ((T([0, 1, 2]), 0), (TABLE, torch.arange(3.0), COLUMNS)),
    "apart": ((0, None, T([1, 2])), (torch.zeros(3, 5, 4), torch.arange(10.0).reshape(2, 5), ROWS)),
    "bool": ((0,), (TABLE > 4, T(True), ODD)),
    "bfloat16": ((0,), (TABLE.bfloat16(), torch.arange(6).bfloat16(), ODD)),
    "complex64": ((0,), (TABLE + 1j, torch.arange(6) * (1 + 2j), ODD)),
}


@pytest.mark.parametrize("case", PUTS)
def test_a_write_through_masks_needs_no_read(case: str) -> None:
    indices, inputs = PUTS[case]
    check(put(*indices), *inputs, reads=0)
    if case in ("an element each", "columns", "two masks, one of one", "bool", "bfloat16"):
        check(put(*indices, accumulate=True), *inputs, reads=0)


def test_a_mask_may_be_what_is_written_through_it() -> None:
    mask = torch.tensor([True, False, True]).to("tpu")
    mask[mask] = False
    assert mask.tolist() == [False, False, False]


def test_assignment_through_a_mask() -> None:
    def assign(values: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        values[mask] = 0
        values[rows, 1] = 5
        values[1:, rows[:1].expand(4)] = 7
        values.masked_scatter_(mask, torch.arange(12.0, device=values.device))
        return values

    check(assign, TABLE, ODD, ROWS, reads=0)
    check(lambda x, m: x.__setitem__(m, x[m] * 2) or x, TABLE, ODD, reads=1)


# ---- unique ------------------------------------------------------------------------------------------------


def all_of(function: Callable[..., Any], **options: Any) -> Callable[[torch.Tensor], Any]:
    return lambda x: function(x, return_inverse=True, return_counts=True, **options)


REPEATING = torch.arange(24).reshape(2, 3, 4) // 2 % 3


@pytest.mark.parametrize("function", [torch.unique, torch.unique_consecutive])
@pytest.mark.parametrize("dim", [None, 0, -1])
def test_unique_values_and_slices(function: Callable[..., Any], dim: int | None) -> None:
    for dtype in (torch.bfloat16, torch.bool):
        check(all_of(function, dim=dim), REPEATING.to(dtype), reads=1)


def test_unique_of_special_values() -> None:
    for values in (T([NAN, 1, NAN, 0.0, -0.0]), T(3.0), T([2**40, 1, -(2**40), 1])):
        check(all_of(torch.unique), values, reads=1)
        check(all_of(torch.unique_consecutive), values, reads=1)
    check(lambda x: aten._unique(x, True, True), REPEATING, reads=1)
    check(torch.unique, REPEATING, reads=1)
    check(lambda x: torch.unique(x, dim=0), T([[2, 1], [1, 9], [2, 1]]), reads=1)


# ---- counts and repeats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_bincount(dtype: torch.dtype) -> None:
    values = T([3, 0, 3, 17]).to(dtype)
    check(torch.bincount, values, reads=1)
    check(lambda x: torch.bincount(x, minlength=40), values, reads=1)
    for weights in (
        T([0.5, 1, 2, 4]),
        T([0.5, 1, 2, 4]).double(),
        T([1, 2, 3, 4]),
        T([1, 2, 3, 4]).bfloat16(),
    ):
        check(torch.bincount, values, weights, reads=1)


def test_repeat_interleave() -> None:
    repeats = T([2, 0, 3, 1])
    for function in (torch.repeat_interleave, lambda r: torch.repeat_interleave(r.int())):
        check(function, repeats, reads=1)
        check(function, repeats * 0, reads=1)
    check(lambda x, r: x.repeat_interleave(r, dim=1), TABLE, repeats, reads=1)
    check(lambda x, r: x.repeat_interleave(r, dim=1, output_size=6), TABLE, repeats, reads=0)
    check(gradient(lambda x, r: x.repeat_interleave(r, dim=1)), TABLE, repeats, reads=1)
    check(gradient(lambda x, r: x.repeat_interleave(r, dim=1, output_size=6)), TABLE, repeats, reads=0)


# ---- programs ----------------------------------------------------------------------------------------------


def assert_few_programs(function: Callable[[torch.Tensor], Any], size: int, counts: range) -> None:
    """Calls with masks of `counts` Trues among `size`, spread."""
    masks = [(torch.arange(size) * 37 % size < count).to("tpu") for count in counts]
    with counted() as moved:
        for mask in masks:
            function(mask)
    assert moved.host_reads == len(counts)
    assert 0 < moved.compilations <= math.log2(size) + 2


def test_200_counts_of_nonzero_are_a_dozen_programs() -> None:
    assert_few_programs(torch.nonzero, 1024, range(1, 1001, 5))


BOUNDED = {
    "nonzero 2-d": lambda mask, values: mask.reshape(8, 8).nonzero(),
    "index": lambda mask, values: values[mask],
    "index rows": lambda mask, values: values.expand(3, 64).t()[mask],
    "index columns": lambda mask, values: values.expand(3, 64)[:, mask],
    "masked_select": lambda mask, values: values[:8].masked_select(mask.reshape(8, 8)),
    "unique": lambda mask, values: torch.unique(values * mask, return_counts=True),
    "bincount": lambda mask, values: torch.bincount(mask.cumsum(0)),
    "repeat_interleave": lambda mask, values: torch.repeat_interleave(mask.long()),
}


@pytest.mark.parametrize("case", BOUNDED)
def test_any_count_is_one_of_few_programs(case: str) -> None:
    values = torch.arange(1.0, 65).to("tpu")
    assert_few_programs(lambda mask: BOUNDED[case](mask, values), 64, range(1, 65, 3))


def test_a_count_met_again_compiles_nothing_in_each_mode() -> None:
    values = torch.arange(100.0).to("tpu")
    for mode in ("debug", "strict", "fused"):
        with torch.tpu.eager_mode(mode):
            first, second = values < 40, values < 60  # one bucket
            assert values[first].sum().item() == sum(range(40))
            torch.unique(values[first]).tolist()
            with counted() as moved:
                assert values[second].tolist() == list(range(60))
            assert moved.compilations == 0


def test_a_result_is_a_tensor_of_its_own() -> None:
    values = torch.arange(10.0).to("tpu")
    selected = values[values > 4]
    assert selected._base is None
    assert selected._version == 0
    selected.mul_(10)
    assert selected.resize_(2).tolist() == [50, 60]
    assert values.tolist() == list(range(10))
    with torch.inference_mode():
        assert values[values > 7].tolist() == [8, 9]


# ---- errors ------------------------------------------------------------------------------------------------

REFUSED = {
    "mask of another size": lambda x: x[T([True, False]).to(x.device)],
    "mask of too many dims": lambda x: x[torch.ones(3, 4, 1, dtype=torch.bool, device=x.device)],
    "masks that differ": lambda x: x[ROWS.to(x.device), COLUMNS.to(x.device)],
    "mask and positions that differ": lambda x: x[ROWS.to(x.device), T([1, 2, 3], device=x.device)],
    "select by integers": lambda x: x.masked_select(x.long()),
    "select by another shape": lambda x: x.masked_select(ROWS.to(x.device)),
    "select into another dtype": lambda x: torch.masked_select(
        x, x > 1, out=x.new_empty(0, dtype=torch.int64)
    ),
    "nonzero into another dtype": lambda x: torch.nonzero(x, out=x.new_empty(0, dtype=torch.int32)),
    "nonzero of a negative size": lambda x: torch.nonzero_static(x, size=-1),
    "put through a mask of another size": lambda x: x.index_put_([COLUMNS.to(x.device)], x[0].clone()),
    "put values of another dtype": lambda x: x.index_put_([ROWS.to(x.device)], x[:2].double()),
    "put values of another width": lambda x: x.index_put_([ROWS.to(x.device)], x[:2, :3].clone()),
    "unique of complex": lambda x: torch.unique(x.to(torch.complex64)),
    "unique of a dim that is not there": lambda x: torch.unique(x, dim=2),
    "unique of dims without elements": lambda x: torch.unique(x[:0], dim=1),
    "bincount of floats": lambda x: torch.bincount(x[0]),
    "bincount of negatives": lambda x: torch.bincount(-x[0].long()),
    "bincount of a matrix": lambda x: torch.bincount(x.long()),
    "bincount with too few weights": lambda x: torch.bincount(x[0].long(), x[0, :3]),
    "bincount with a negative minlength": lambda x: torch.bincount(x[0].long(), minlength=-1),
    "repeat less than never": lambda x: torch.repeat_interleave(-x[0].long()),
    "repeat by a matrix": lambda x: torch.repeat_interleave(x.long()),
    "repeat by floats": lambda x: torch.repeat_interleave(x[0]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_pytorch_refuses_is_refused_in_its_words(case: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((RuntimeError, IndexError, NotImplementedError)) as theirs:
            REFUSED[case](TABLE.clone())
        with pytest.raises(type(theirs.value)) as ours:
            REFUSED[case](TABLE.to("tpu"))
    assert str(ours.value).splitlines()[0] == str(theirs.value).splitlines()[0]


def test_out_of_another_size_is_resized_with_pytorchs_warning() -> None:
    out = torch.empty(5, dtype=torch.int64, device="tpu")
    with pytest.warns(UserWarning, match="An output with one or more elements was resized"):
        torch.nonzero(ODD.to("tpu"), out=out)
    assert_same(out, ODD.nonzero())
    matching = tree_map_only(torch.Tensor, torch.zeros_like, ODD.nonzero()).contiguous().to("tpu")
    torch.nonzero(ODD.to("tpu"), out=matching)
    assert torch.equal(matching.cpu(), ODD.nonzero())


def test_least_squares_of_a_tall_matrix() -> None:
    matrix, right = torch.randn(6, 3), torch.randn(6, 2)
    for driver in (None, "gels", "gelsy", "gelsd", "gelss"):
        expected = torch.linalg.lstsq(matrix, right, driver=driver)
        found = torch.linalg.lstsq(matrix.to("tpu"), right.to("tpu"), driver=driver)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
