"""`cond`, `while_loop`, `scan` and `associative_scan` in a graph: eager mode's values and gradients."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops.associative_scan import associative_scan_op

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo", "whole_graphs")


def both(function: Callable, *values: Tensor, eager: Callable | None = None, gradients: bool = True) -> None:
    """Compiled on tpu as in eager mode on the cpu, values and gradients, in one entry a graph."""
    found = []
    for call, device in ((eager or function, "cpu"), (torch.compile(function, backend="tpu"), "tpu")):
        inputs = [each.clone().to(device) for each in values]
        wanted = [each.requires_grad_() for each in inputs if gradients and each.is_floating_point()]
        results = call(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        total = sum(each.square().sum() for each in results if each.is_floating_point())
        slopes = torch.autograd.grad(total, wanted) if gradients else ()
        found.append([each.detach().cpu() for each in (*results, *slopes)])
    for ours, theirs in zip(*reversed(found), strict=True):
        torch.testing.assert_close(ours, theirs)


X, W = torch.linspace(-1, 1.5, 12).reshape(4, 3), torch.tensor([0.5, -1.0, 2.0])


def branches(x: Tensor, w: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return torch.cond(x[0, 0] > 0, lambda x: x * 3, lambda x: x.exp(), (x,))

    return torch.cond(x.sum() > 0, lambda x: x.sin() * w, lambda x: inner(x) + w, (x,))


@pytest.mark.parametrize("sign", [1, -1])
def test_cond_takes_one_branch_and_nests(sign):
    both(branches, X * sign, W)


def test_scan_carries_and_stacks():
    def by_hand(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        carry, ys = torch.ones(3, dtype=x.dtype), []
        for row in x:
            ys.append((carry + row).sin())
            carry = carry * row + w
        return carry, torch.stack(ys)

    def scanned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return scan(lambda c, row: (c * row + w, (c + row).sin()), torch.ones_like(w), x)

    both(scanned, X, W, eager=by_hand)


def combine(left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return left[0] * right[0], right[0] * left[1] + right[1]


def scanned_by_hand(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    rows = [(x[0], y[0])]
    for row in zip(x[1:], y[1:]):
        rows.append(combine(rows[-1], row))
    first, second = zip(*rows)
    return torch.stack(first), torch.stack(second)


def test_associative_scan_of_two_leaves():
    def scanned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return associative_scan(combine, (x, y), 0, combine_mode="generic")

    both(scanned, X, X * 2 + 1, eager=scanned_by_hand)


def test_associative_scan_that_pytorch_keeps_whole():
    """As it does in combine_mode="pointwise", which its front end refuses to other devices."""

    def scanned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(associative_scan_op(lambda a, b, c, d: combine((a, b), (c, d)), (x, y), ()))

    both(scanned, X, X * 2 + 1, eager=scanned_by_hand, gradients=False)


def test_while_loop_with_a_cond_inside():
    def looped(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def body(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return count + 1, torch.cond(count % 2 == 0, lambda x: x * w, lambda x: x + 1, (x,))

        return while_loop(
            lambda count, x: count < 5, body, (torch.zeros((), dtype=torch.int64, device=x.device), x)
        )

    def by_hand(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for count in range(5):
            x = x * w if count % 2 == 0 else x + 1
        return torch.tensor(5), x

    both(looped, X, W, eager=by_hand, gradients=False)


def in_cond(table: Tensor, index: Tensor) -> Tensor:
    return torch.cond(index[0] > 0, lambda t, i: t[i], lambda t, i: t[i] * 2 + t[i - 1], (table, index))


def in_scan(table: Tensor, index: Tensor) -> Tensor:
    return scan(
        lambda c, i: (c + table.index_select(0, i[None])[0], c.clone()), torch.zeros_like(table[0]), index
    )[1]


def in_loop(table: Tensor, index: Tensor) -> Tensor:
    def body(count: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, x + table.index_select(0, index.take(count)[None])[0]

    start = torch.zeros((), dtype=torch.int64, device=table.device)
    return while_loop(lambda count, x: index.take(count) != 0, body, (start, torch.zeros_like(table[0])))[1]


@pytest.mark.parametrize("function", [in_cond, in_scan, in_loop])
def test_an_index_that_is_out_of_range_inside_is_an_error_as_outside(function):
    compiled = torch.compile(function, backend="tpu")
    table = X.to("tpu")
    assert compiled(table, torch.tensor([1, 2, 3, 0]).to("tpu")).cpu().isfinite().all()
    with pytest.raises(IndexError, match=r"index (9 is out of bounds|out of range in self)"):
        compiled(table, torch.tensor([1, 9, 2, 0]).to("tpu")).cpu()
    assert compiled(table, torch.tensor([1, 3, 2, 0]).to("tpu")).cpu().isfinite().all()
