"""Dynamic shapes: few programs where that is proven, a program a size elsewhere, said when many."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpu_backend.buckets import bucket

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")


def test_buckets():
    sizes = [bucket(size) for size in range(1, 50)]
    assert sorted(set(sizes)) == [4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert all(size <= padded <= max(4, 1.5 * size) for size, padded in enumerate(sizes, 1))
    assert all(bucket(size) == size for size in sizes)


def compare(function, inputs, pads: bool = True) -> None:
    """Values for several sizes, and whether those of a bucket share a program."""
    fast = torch.compile(function, backend="tpu", dynamic=True)
    before = max((each.number for each in torch.tpu.compilations()), default=0)
    with torch.no_grad():
        for size in (7, 10, 12, 9, 15):  # the first two as they are
            x = inputs(size)
            ours = fast(*(each.to("tpu") for each in x))
            theirs = function(*x)
            ours, theirs = ((each,) if isinstance(each, Tensor) else each for each in (ours, theirs))
            for mine, other in zip(ours, theirs, strict=True):
                if isinstance(other, Tensor):
                    assert mine.shape == other.shape
                    assert mine.is_contiguous() == other.is_contiguous()
                    torch.testing.assert_close(mine.cpu(), other)
                else:
                    assert mine == other
    made = [str(each) for each in torch.tpu.compilations() if each.number > before]
    made = [text for text in made if "tpu_graph::" in text]
    assert len(made) == (3 if pads else 5), made


class Rows(nn.Module):
    def __init__(self, device: str):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 8)
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 12)
        self.to(device)

    def forward(self, index: Tensor, y: Tensor) -> Tensor:
        x = self.norm(self.table(index) * y.unsqueeze(1))
        return F.gelu(self.up(x)).view(-1, 3, 4).transpose(1, 2).softmax(-1).sum(1)


def test_sizes_of_a_model_share_a_program():
    def run(index: Tensor, y: Tensor) -> Tensor:
        return modules[index.device.type](index, y)

    modules = {device: Rows(device) for device in ("cpu", "tpu")}
    compare(run, lambda size: (torch.arange(size) % 6, torch.randn(size)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2 + 1, x.shape[0]),
        lambda x: x.softmax(1)[None].contiguous(),
        lambda x: 7 // (x > -9).long(),  # a row of zeros would divide by zero
        lambda x: x.sum([]).expand(x.shape[0]) * 2,
        lambda x: x / x.shape[0],
        lambda x: x.cumsum(0),
        lambda x: x.softmax(0),
        lambda x: x @ x.t(),
        lambda x: x.reshape(-1) * 2,
        lambda x: x.flip(0),
        lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None],
        lambda x: torch.cat([x, x]),
        lambda x: x.t() * 2,
    ],
)
def test_sizes_share_a_program_where_that_is_proven(function):
    compare(function, lambda size: (torch.randn(size, 3),))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.conv1d(x.t()[None], x.new_ones(1, 3, 3), stride=2),
        lambda x: torch.linalg.inv(x @ x.t() + torch.eye(x.shape[0], device=x.device)),
    ],
)
def test_other_sizes_have_a_program_each(function):
    compare(function, lambda size: (torch.randn(size, 3),), pads=False)


def test_padding_behind_a_graph_break_is_not_traced():
    """Dynamo leaves the lookup to eager mode; with it goes what pads and cuts, in Python and NumPy."""

    def function(x: Tensor) -> Tensor:
        y = x.flip(0) * 2
        return x[y.argmax(0)[0]].expand(x.shape[0], 3) + x + y

    fast = torch.compile(function, backend="tpu", dynamic=True)
    with torch.no_grad():
        for size in (7, 10, 12, 9, 40, 15, 34):
            x = torch.randn(size, 3)
            torch.testing.assert_close(fast(x.to("tpu")).cpu(), function(x))


def test_many_programs_of_one_graph_are_said_once_with_the_argument(caplog):
    fast = torch.compile(lambda batch: (batch / batch.sum(0)).exp(), backend="tpu", dynamic=True)
    with caplog.at_level(logging.WARNING, "tpu_backend.compile"), torch.no_grad(), torch.tpu.pad_sizes(False):
        for size in range(3, 15):
            fast(torch.ones(size, 2, device="tpu")).cpu()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tpu_backend.compile"]
    assert line == (
        "torch.compile: the inference graph has met 9 sets of sizes, each a program: "
        "batch.shape[0] is 11 now; pad what varies"
    )


def test_a_view_of_an_input_whose_size_is_an_input_is_returned():
    def rows(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.view(x.shape[0], -1, 2), x + 1

    fast = torch.compile(rows, backend="tpu", dynamic=True)
    for number in (3, 5):
        x = torch.arange(6.0 * number).view(number, 6)
        for found, expected in zip(fast(x.to("tpu")), rows(x), strict=True):
            assert torch.equal(found.cpu(), expected)
