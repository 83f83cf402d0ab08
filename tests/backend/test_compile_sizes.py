"""Dynamic shapes: few programs where padding is safe, a program a size elsewhere, said when many."""

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


def compare(function, inputs, pads: bool) -> None:
    """Values for several sizes, and whether a second size of the same bucket runs the first one's program."""
    fast = torch.compile(function, backend="tpu", dynamic=True)
    shapes = []
    with torch.no_grad():
        for size in (7, 8, 5):
            x = inputs(size)
            ours = fast(*(each.to("tpu") for each in x))
            calls = [call for call, _ in torch.tpu.recent_ops() if call.startswith("tpu_graph")]
            shapes.append(calls[-1].partition("(")[2])
            theirs = function(*x)
            ours, theirs = ((each,) if isinstance(each, Tensor) else each for each in (ours, theirs))
            for mine, other in zip(ours, theirs, strict=True):
                if isinstance(other, Tensor):
                    assert mine.shape == other.shape
                    assert mine.is_contiguous() == other.is_contiguous()
                    torch.testing.assert_close(mine.cpu(), other)
                else:
                    assert mine == other
    assert len(set(shapes)) == (2 if pads else 3), shapes


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


def test_rows_that_do_not_meet_are_padded():
    def run(index: Tensor, y: Tensor) -> Tensor:
        return modules[index.device.type](index, y)

    modules = {device: Rows(device) for device in ("cpu", "tpu")}
    compare(run, lambda size: (torch.arange(size) % 6, torch.randn(size)), pads=True)


@pytest.mark.parametrize(
    ("function", "pads"),
    [
        (lambda x: (x * 2 + 1, x.shape[0]), True),
        (lambda x: x.softmax(1)[None].contiguous(), True),
        (lambda x: 7 // (x > -9).long(), True),  # a row of zeros would divide by zero
        (lambda x: (x @ x.new_ones(3, 2)).bmm(x.new_ones(1, 2, 2)) if x.dim() == 3 else x.exp(), True),
        (lambda x: x.sum(0), False),
        (lambda x: x.sum([]).expand(x.shape[0]) * 2, False),
        (lambda x: x / x.shape[0], False),
        (lambda x: x.cumsum(0), False),
        (lambda x: x.softmax(0), False),
        (lambda x: x @ x.t(), False),
        (lambda x: x.reshape(-1) * 2, False),
        (lambda x: x.flip(0), False),
        (lambda x: x + torch.arange(x.shape[0], device=x.device)[:, None], False),
        (lambda x: torch.cat([x, x]), False),
        (lambda x: x.t() * 2, False),
    ],
)
def test_only_what_keeps_rows_apart_is_padded(function, pads):
    compare(function, lambda size: (torch.randn(size, 3),), pads)


def test_many_programs_of_one_graph_are_said_once_with_the_argument(caplog):
    fast = torch.compile(lambda batch: (batch / batch.sum(0)).exp(), backend="tpu", dynamic=True)
    with caplog.at_level(logging.WARNING, "tpu_backend.compile"), torch.no_grad():
        for size in range(3, 15):
            fast(torch.ones(size, 2, device="tpu"))
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
