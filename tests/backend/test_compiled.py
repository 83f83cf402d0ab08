"""`torch.compile(..., backend="tpu")`: the same numbers as eager mode, and one entry a graph."""

import copy
import re
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from tpu_backend import compiling

pytestmark = pytest.mark.usefixtures("forgotten_by_dynamo")


def compiled(function: Callable, **options: object) -> Callable:
    return torch.compile(function, backend="tpu", **options)


def entries(run: Callable[[], object]) -> list[str]:
    """The operations that `run` records, by name."""
    torch.tpu.flush()
    before = torch.tpu.compile_stats()["ops_recorded"]
    run()
    count = torch.tpu.compile_stats()["ops_recorded"] - before
    assert count <= 32
    return [call.split("(")[0] for call, _ in torch.tpu.recent_ops()[-count:]] if count else []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.Linear(12, 6)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


def step(model: Callable, parameters: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    torch.tpu.manual_seed(7)
    for parameter in parameters:
        parameter.grad = None
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in parameters]


def test_loss_gradients_and_random_numbers_are_eager_mode_s():
    torch.manual_seed(0)
    model = Block().to("tpu")
    x = torch.randn(4, 5, 6, device="tpu")
    parameters = list(model.parameters())
    loss, gradients = step(model, parameters, x)
    state = torch.tpu.get_rng_state()
    fast = compiled(model)
    for _ in range(2):
        its_loss, its_gradients = step(fast, parameters, x)
        assert torch.equal(torch.tpu.get_rng_state(), state)
        torch.testing.assert_close(its_loss.cpu(), loss.cpu())
        for ours, theirs in zip(its_gradients, gradients, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs.cpu())
    dropped = []
    for function in (model, fast):
        torch.tpu.manual_seed(7)
        dropped.append((function(x) == x).cpu())
    assert dropped[0].any()
    assert torch.equal(*dropped)


def test_a_graph_is_one_entry_forward_and_one_backward_and_joins_the_segment():
    model = Block().to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fast = compiled(model)
    x = torch.randn(4, 5, 6, device="tpu")

    def one_step() -> None:
        fast(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    one_step()
    one_step()
    torch.tpu.flush()
    before = torch.tpu.compile_stats()
    names = entries(one_step)
    torch.tpu.flush()
    after = torch.tpu.compile_stats()
    assert [name.split("_")[0:2] for name in names if name.startswith("tpu_graph")] == [
        ["tpu", "graph::forward"],
        ["tpu", "graph::backward"],
    ]
    assert len(names) <= 8
    assert after["segments_run"] - before["segments_run"] == 1
    assert after["compilations"] == before["compilations"]


def views_and_lists(x: Tensor) -> tuple[Tensor, ...]:
    first, second = x.t().split([1, 2])
    y = torch.cat([first * 2, second[:, 1:2].expand(2, x.shape[0])])
    z = torch.zeros_like(y)
    z[1:, ::2] = y[1:, ::2]
    return y, z.sum(0), x[1], torch.arange(2, 9, 3, device=x.device), first.unsqueeze(0)


def scalars(x: Tensor) -> tuple[Tensor, ...]:
    return x.add(2, alpha=3), x / 3, x > 0.5, torch.where(x > 0, x, 1.0), x.clamp(min=0), x**2, x.long() % 3


def normed(x: Tensor) -> tuple[Tensor, ...]:
    top, place = x.topk(2)
    return F.softmax(x, -1), F.layer_norm(x, x.shape[-1:]), top, place, x.var(0), x.cumsum(1), x.argmax(1)


@pytest.mark.parametrize("function", [views_and_lists, scalars, normed])
def test_operations_are_those_of_the_lowering_table(function):
    x = torch.randn(4, 3)
    for ours, theirs in zip(compiled(function)(x.to("tpu")), function(x), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
        assert ours.stride() == theirs.stride()


def test_complex_products_have_eager_mode_s_gradients():
    def turned(x: Tensor, w: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x) * w.conj()).square().sum()

    x, w = torch.randn(3, 2), torch.randn(3, dtype=torch.complex64)
    found = []
    for function, device in ((turned, "cpu"), (compiled(turned), "tpu")):
        inputs = [value.to(device).requires_grad_() for value in (x, w)]
        found.append([each.cpu() for each in torch.autograd.grad(function(*inputs), inputs)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2, (x.sum() + 1).cpu()),
        lambda x: x + torch.ones(3).to(x.device),
        lambda x: x.t().contiguous().t().as_strided((2, 2), (1, 3)),
    ],
    ids=["moved to the cpu", "made on the cpu", "counted in storage"],
)
def test_what_is_not_only_the_device_s_is_as_in_eager_mode(function):
    x = torch.randn(3, 3, device="tpu")
    ours, theirs = compiled(function)(x), function(x)
    for each, other in zip(*((value if isinstance(value, tuple) else (value,)) for value in (ours, theirs))):
        assert each.device == other.device
        torch.testing.assert_close(each.cpu(), other.cpu())


def test_inputs_are_mutated_and_outputs_alias_as_in_eager_mode():
    def change(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(2)
        y[1:] += x[:-1]
        return x, y.t()

    fast = compiled(change)
    results = []
    for function in (change, fast, fast):
        x, y = torch.ones(3, 2, device="tpu"), torch.arange(6.0, device="tpu").view(3, 2)
        same, turned = function(x, y)
        assert same is x
        assert turned.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        turned.add_(1)
        results.append((x.cpu(), y.cpu()))
    for x, y in results[1:]:
        assert torch.equal(x, results[0][0])
        assert torch.equal(y, results[0][1])


def test_buffers_autocast_and_checkpointing():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block, self.out = nn.BatchNorm1d(6), Block(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("tpu", dtype=torch.bfloat16):
                return self.out(checkpoint(self.block, self.norm(x), use_reentrant=False)).float()

    torch.manual_seed(1)
    model = Model().to("tpu")
    twin = copy.deepcopy(model)
    fast = compiled(twin)
    x = torch.randn(8, 6, device="tpu")
    loss, gradients = step(model, list(model.parameters()), x)
    its_loss, its_gradients = step(fast, list(twin.parameters()), x)
    torch.testing.assert_close(its_loss.cpu(), loss.cpu(), rtol=1e-2, atol=1e-3)
    for ours, theirs in zip(its_gradients, gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu(), rtol=5e-2, atol=5e-3)
    assert twin.norm.num_batches_tracked.item() == 1
    torch.testing.assert_close(twin.norm.running_mean.cpu(), model.norm.running_mean.cpu())


def test_dropout_that_is_computed_again_in_backward_is_the_same_bit_for_bit():
    from torch.utils.checkpoint import checkpoint

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return F.dropout(x, 0.5)

    torch.manual_seed(2)
    model = Layers().to("tpu")
    x = torch.randn(4, 6, device="tpu")
    loss, gradients = step(model, list(model.parameters()), x)
    its_loss, its_gradients = step(compiled(model), list(model.parameters()), x)
    assert torch.equal(its_loss.cpu(), loss.cpu())
    for ours, theirs in zip(its_gradients, gradients, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs.cpu())


def test_another_size_is_another_program_of_the_same_graph():
    def mean(x: Tensor) -> Tensor:
        return (x.reshape(-1, 2) * x.shape[0]).mean(0)

    fast = compiled(mean, dynamic=True)
    x = torch.randn(9, 4)
    for size in (3, 5, 9):
        torch.testing.assert_close(fast(x[:size].to("tpu")).cpu(), mean(x[:size]))
    names = entries(lambda: fast(x[:7].to("tpu")))
    assert sum(name.startswith("tpu_graph") for name in names) == 1


def test_tensors_that_a_graph_makes_of_numbers_are_inputs_of_it():
    def weigh(x: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.tensor([1.0, 2.0, 4.0], device=x.device)
        weights.mul_(2)
        return x * weights, torch.cat([torch.tensor([], device=x.device), x])

    fast = compiled(weigh)
    x = torch.randn(3)
    for _ in range(2):
        names = entries(lambda: fast(x.to("tpu")))
        assert sum(name.startswith("tpu_graph") for name in names) == 1
        for ours, theirs in zip(fast(x.to("tpu")), weigh(x), strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)


def test_a_graph_that_has_nothing_of_the_device_is_left_to_pytorch(caplog):
    x = torch.randn(3)
    assert torch.equal(compiled(lambda x: x * 2 + 1)(x), x * 2 + 1)
    assert not [record for record in caplog.records if record.name.startswith("tpu_backend")]


def test_options_there_are_none():
    with pytest.raises(Exception, match=r"takes no mode and no options, got .*'fast'"):
        compiled(torch.sin, options={"fast": True})(torch.ones(2, device="tpu"))


def test_compiled_autograd():
    """Its graphs are given the sizes of what they read as empty tensors on the CPU."""
    model = nn.Linear(6, 3).to("tpu")
    for batch in (4, 5):
        x = torch.randn(batch, 6, device="tpu")
        model(x).square().sum().backward()
        expected = model.weight.grad.clone()
        model.zero_grad()
        loss = model(x).square().sum()
        with compiled_autograd._enable(torch.compile(backend="tpu")):
            loss.backward()
        torch.testing.assert_close(model.weight.grad, expected)
        model.zero_grad()


def test_who_waits_long_is_told_what_for(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_PATIENCE", 0.0)
    monkeypatch.setattr(compiling, "_INTERVAL", 0.01)

    def many(x: Tensor) -> Tensor:
        for size in range(2, 10):  # each has loops of its own: together they take XLA many intervals
            x = x.sin().cumsum(0).repeat(2, 1)[:size].softmax(0)
        return x

    compiled(many)(torch.ones(4, 7, device="tpu")).cpu()
    said = capsys.readouterr().err
    assert re.search(
        r"tpu: still compiling a graph of torch.compile of \d+ operations, for \d+ s\n(.*\n)*tpu: compiled",
        said,
    )
    news = re.findall(r"tpu: still compiling a program of \d+ operations, for \d+ s: .*tpu_graph::.*", said)
    assert len(news) > 1, said
    assert "test_compiled.py:" in news[0]
    assert news[0].endswith("; TPU_CACHE_DIR=DIR keeps it for the next start")


def test_who_waits_long_for_many_short_compilations_is_told(monkeypatch, capsys):
    monkeypatch.setattr(compiling, "_PATIENCE", 1000.0)
    monkeypatch.setattr(compiling, "_SHORTEST", 0.1)
    monkeypatch.setattr(compiling, "_untold", 0.0)
    start = time.perf_counter()
    with compiling.compiling(7), compiling.compiling(3):  # a graph of torch.compile holds its program
        time.sleep(0.3)
    assert 0.3 <= compiling._untold <= time.perf_counter() - start, "counted once"
    assert not capsys.readouterr().err
    for ended_at, told in ((time.perf_counter(), True), (time.perf_counter() - 1000, False)):
        monkeypatch.setattr(compiling, "_untold", 999.95)
        monkeypatch.setattr(compiling, "_ended_at", ended_at)
        with compiling.compiling(7, lambda: "aten::add"):
            time.sleep(1.0)
        said = capsys.readouterr().err
        text = (
            r"tpu: still compiling a program of 7 operations, for \d+ s, after 1000 s of others: aten::add\n"
        )
        assert bool(re.fullmatch(rf"{text}tpu: compiled in \d+ s\n", said)) == told, said
        assert (compiling._untold == 0.0) == told


def test_what_comes_out_is_what_eager_mode_says_where_pytorchs_meta_kernel_errs():
    truth, x = torch.tensor([True, False], device="tpu"), torch.randn(3, 4, device="tpu")
    assert compiled(lambda x: x**True)(truth).dtype == torch.bool  # int64, says PyTorch
    cell = nn.LSTMCell(4, 5, bias=False).to("tpu")  # a bias that is None has no device
    torch.testing.assert_close(compiled(cell)(x), cell(x))


OVERFLOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "masked_fill of 16 bit": lambda x: x.half().masked_fill(x > 0, -1e9),
    "full of bytes": lambda x: torch.full((2,), 300, dtype=torch.uint8, device=x.device),
    "clamp of 16 bit": lambda x: x.half().clamp(max=1e9) + 1,
    "alpha of bytes": lambda x: torch.add(x.byte(), x.byte(), alpha=300),
    "lists of 16 bit": lambda x: torch._foreach_clamp_max([x.half(), x], [1e9, 2.0])[0],
    "lerp": lambda x: torch.lerp(x, x, 1e39),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_number_that_overflows_is_refused_as_in_eager_mode(name):
    x = torch.ones(2, device="tpu")
    with pytest.raises(RuntimeError, match=r"^value cannot be converted to type .* without overflow$"):
        compiled(OVERFLOWS[name])(x)


def test_a_number_that_fits_splits_no_graph():
    x = torch.ones(2, device="tpu")
    run = compiled(lambda x: x.half().masked_fill(x > 0, -6e4).masked_fill(x < 0, -float("inf")) + 1)
    assert len(entries(lambda: run(x))) == 1
    assert run(x).tolist() == [-6e4, -6e4]


def test_a_part_that_is_written_keeps_the_dtype():
    x = torch.ones(2, device="tpu", dtype=torch.half)
    assert compiled(lambda x: torch.select_scatter(x, x[0].float(), 0, 1) * 2)(x).dtype == torch.half
