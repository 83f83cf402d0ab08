"""What is recorded, when it is cut, what is compiled and what is read: `compile_stats` by value."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn


class Counted:
    """How far each counter of `compile_stats` moved."""

    ops_recorded = segments_run = compilations = memory_hits = host_reads = 0


@contextmanager
def counted() -> Iterator[Counted]:
    torch.tpu.flush()
    before, moved = torch.tpu.compile_stats(), Counted()
    yield moved
    torch.tpu.flush()
    for name, value in torch.tpu.compile_stats().items():
        setattr(moved, name, value - before[name])


def test_the_counters_are_there():
    stats = torch.tpu.compile_stats()
    assert set(stats) >= {
        "ops_recorded",
        "segments_run",
        "compilations",
        "memory_hits",
        "disk_hits",
        "compile_seconds",
        "host_reads",
    }
    assert all(value >= 0 for value in stats.values())


def test_fused_cuts_at_a_read_strict_after_each_op():
    x = torch.ones(3, device="tpu")
    for mode, segments in (("fused", 1), ("strict", 3), ("debug", 3)):
        with torch.tpu.eager_mode(mode), counted() as moved:
            assert ((x + 1) * 2).sum().item() == 12
        assert (moved.ops_recorded, moved.segments_run, moved.host_reads) == (3, segments, 1)


def test_the_last_operations_are_known_and_whether_they_were_launched():
    x = torch.ones(2, 3, device="tpu")
    torch.tpu.flush()
    y = x + 1
    (y @ y.t()).sum().item()
    waiting = y.exp()
    *_, total, last = torch.tpu.recent_ops()
    assert total == ("aten::sum(self=float32[2, 2])", True)
    assert last == ("aten::exp(self=float32[2, 3])", False)
    for _ in range(40):
        waiting.neg_()
    assert torch.tpu.recent_ops() == [("aten::neg_(self=float32[2, 3])", False)] * 32


def test_flush_dispatches_and_reads_nothing():
    x = torch.ones(3, device="tpu")
    with counted() as moved:
        y = x + 1
        torch.tpu.flush()
        z = y + 1
        torch.tpu.flush()
        torch.tpu.flush()  # nothing left to do
    assert (moved.segments_run, moved.host_reads) == (2, 0)
    assert z.tolist() == [3, 3, 3]


def test_what_nobody_can_see_is_not_run():
    x = torch.ones(3, device="tpu")
    with counted() as moved:
        for _ in range(3):
            x + 1
        torch.tpu.flush()
    assert (moved.ops_recorded, moved.segments_run) == (3, 0)


def test_moving_tensors_and_making_views_runs_nothing():
    with counted() as moved:
        x = torch.arange(6.0).reshape(2, 3).to("tpu")
        views = [x.t(), x[1:], x.view(6), x.expand(4, 2, 3), x.detach(), x.clone()]
        assert [view.shape.numel() for view in views] == [6, 3, 6, 24, 6, 6]
    assert (moved.segments_run, moved.compilations, moved.host_reads) == (0, 0, 0)


@pytest.mark.parametrize(
    "read", [torch.Tensor.item, float, bool, torch.Tensor.tolist, torch.Tensor.cpu, repr]
)
def test_each_way_of_reading_is_one_host_read(read):
    x = torch.full((), 2.0, device="tpu")
    with counted() as moved:
        read(x)
    assert moved.host_reads == 1


# ---- steady state ------------------------------------------------------------------------------------------


def _training_step(accumulation: int) -> tuple[Callable[[int], torch.Tensor], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    batches = torch.randn(100, 5, 4)

    def step(number: int) -> torch.Tensor:
        total = torch.zeros((), device="tpu")
        for part in range(accumulation):
            batch = batches[number * accumulation + part].to("tpu")
            loss = model(batch).square().mean() / accumulation
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        return total

    return step, model


@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_training_step_is_one_segment_and_compiles_nothing_after_step_three(accumulation):
    step, _ = _training_step(accumulation)
    for number in range(3):
        loss = step(number)
    for log_interval in (1, 5):
        with counted() as moved:
            for number in range(3, 3 + log_interval):
                loss = step(number)
        assert moved.segments_run == log_interval
        assert (moved.compilations, moved.host_reads) == (0, 0)
    assert loss.isfinite().item()


def test_a_loss_read_every_step_still_is_one_segment():
    step, _ = _training_step(1)
    losses = [step(number).item() for number in range(3)]
    with counted() as moved:
        losses += [step(number).item() for number in range(3, 8)]
    assert (moved.segments_run, moved.compilations, moved.host_reads) == (5, 0, 5)
    assert len(set(losses)) == 8


def test_a_metric_that_is_kept_compiles_nothing():
    step, _ = _training_step(1)
    kept = [step(number) for number in range(4)]  # alive at each cut
    with counted() as moved:
        for number in range(4, 8):
            step(number)  # not kept
        kept += [step(number) for number in range(8, 10)]
    assert moved.compilations <= 1
    assert torch.stack(kept).isfinite().all().item()


def test_a_clone_that_is_kept_compiles_nothing_and_keeps_its_values():
    step, model = _training_step(1)
    for number in range(3):
        step(number)
    kept: list[torch.Tensor] = []
    expected = []
    with counted() as moved:
        for number, parameter in enumerate(model.parameters(), 3):  # another set of shared values each time
            kept.append(parameter.detach().clone())
            expected.append(parameter.detach().cpu().clone())
            step(number)
            torch.tpu.flush()
    assert moved.compilations == 0
    for clone, values, parameter in zip(kept, expected, model.parameters(), strict=True):
        assert torch.equal(clone.cpu(), values)
        assert not torch.equal(parameter.detach().cpu(), values)


def test_an_average_that_is_kept_by_clones_compiles_nothing_after_its_first_step():
    step, model = _training_step(1)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    before = [each.clone() for each in average]

    def averaged(number: int) -> None:
        step(number)
        for kept, parameter in zip(average, model.parameters(), strict=True):
            kept.mul_(0.5).add_(parameter.detach().clone(), alpha=0.5)

    for number in range(3):
        averaged(number)
    with counted() as moved:
        for number in range(3, 6):
            averaged(number)
    assert moved.compilations == 0
    assert all(not torch.equal(one.cpu(), other.cpu()) for one, other in zip(average, before, strict=True))


def test_a_view_of_the_host_on_a_value_that_is_written_compiles_nothing():
    x = torch.ones(41, device="tpu")

    def write() -> None:
        x.mul_(2).add_(1)

    for _ in range(2):
        write()
        torch.tpu.flush()
    with counted() as moved:
        looked = x.cpu().numpy()
        write()
        torch.tpu.flush()
    assert moved.compilations == 0
    assert (looked == 7).all()
    assert x.tolist() == [15] * 41


def test_results_that_are_kept_in_turns_come_to_an_end_of_compiling():
    """The first four sets have programs that return no others; later ones return all that ever were kept."""
    x = torch.ones(43, device="tpu")

    def run(*kept: int) -> list[float]:
        values = [x * 2 + 1]
        for _ in range(9):
            values.append(values[-1] * 3 - 2)
        found = [values[place] for place in kept]
        del values
        torch.tpu.flush()
        return [each[0].item() for each in found]

    expected = [run(place)[0] for place in range(10)]
    with counted() as moved:
        for one in range(10):
            for other in range(one + 1, 10):
                assert run(one, other) == [expected[one], expected[other]]
    assert moved.compilations <= 10


def test_the_second_model_of_the_same_shape_compiles_nothing():
    for number in range(3):
        _training_step(1)[0](number)
    with counted() as moved:
        step, _ = _training_step(1)
        for number in range(3):
            step(number)
    assert moved.compilations == 0


# ---- what never makes a new program ------------------------------------------------------------------------


def test_a_thousand_indices_are_at_most_two_programs():
    x = torch.arange(3000.0).reshape(1000, 3).to("tpu")
    expected = torch.arange(3000.0).reshape(1000, 3)
    with counted() as moved:
        for i in range(1000):
            y = x[i] * 2
            if i % 100 == 0:
                assert y.tolist() == (expected[i] * 2).tolist()
            torch.tpu.flush()
    assert moved.compilations <= 2
    with counted() as moved:
        for i in range(1000):
            x[i] = float(i)
            torch.tpu.flush()
    assert moved.compilations <= 2
    assert torch.equal(x.cpu(), torch.arange(1000.0)[:, None].expand(1000, 3))


def test_a_window_that_moves_is_at_most_two_programs():
    x = torch.arange(64.0).to("tpu")
    with counted() as moved:
        sums = [x[i : i + 8].sum().item() for i in range(56)]
        for i in range(56):
            x[i : i + 2] += 1
            torch.tpu.flush()
    assert sums == [8.0 * i + 28 for i in range(56)]
    assert moved.compilations <= 4
    assert x.sum().item() == 63 * 32 + 112


NUMBERS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "x * v": lambda x, v: x * v,
    "x + v": lambda x, v: x + v,
    "v - x": lambda x, v: v - x,
    "x / v": lambda x, v: x / v,
    "v / x": lambda x, v: v / x,
    "x > v": lambda x, v: x > v,
    "x.clamp(v, 2 * v)": lambda x, v: x.clamp(v, 2 * v),
    "x.add(x, alpha=v)": lambda x, v: x.add(x, alpha=v),
    "x.lerp(x + 1, v)": lambda x, v: x.lerp(x + 1, v),
    "x.fill_(v)": lambda x, v: x.clone().fill_(v),
    "torch.full": lambda x, v: torch.full((4,), v, device=x.device),
    "x.mul_(v)": lambda x, v: x.clone().mul_(v),
    "where(x > 2, x, v)": lambda x, v: torch.where(x > 2, x, v),
    "masked_fill": lambda x, v: x.masked_fill(x > 2, v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "0-d tensor": lambda x, v: x * torch.tensor(v),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_never_makes_a_new_program(name):
    function = NUMBERS[name]
    host = torch.tensor([1.0, 2.0, 3.0, 4.0])
    device = host.to("tpu")
    values = [1.5, 2.5, 0.25, 3.0, 17.0]
    function(device, 1.25).cpu()
    with counted() as moved:
        results = [function(device, value).cpu() for value in values]
    assert moved.compilations == 0
    for value, result in zip(values, results, strict=True):
        torch.testing.assert_close(result, function(host, value), rtol=1e-6, atol=1e-6)


def test_an_integer_number_is_exact_and_makes_no_new_program():
    host = torch.tensor([1, 2**53 + 1, -7])
    device = host.to("tpu")
    (device + 1).cpu()
    values = [5, 2**53 + 1, -(2**60) - 3]
    with counted() as moved:
        results = [(device + value).cpu() for value in values]
    assert moved.compilations == 0
    assert all(torch.equal(result, host + value) for value, result in zip(values, results, strict=True))


def test_a_new_shape_is_a_new_program_and_is_remembered():
    def run(size: int) -> float:
        return (torch.ones(size).to("tpu") * 3).sum().item()

    run(11)
    with counted() as moved:
        assert run(13) == 39
    assert moved.compilations == 1
    with counted() as moved:
        assert [run(11), run(13)] == [33, 39]
    assert (moved.compilations, moved.memory_hits) == (0, 2)


# ---- fallback ----------------------------------------------------------------------------------------------

# XLA has no program for the eigenvalues of a general matrix.


def test_an_op_without_a_lowering_is_right_warned_about_once_and_counted():
    torch.tpu.reset_fallback_stats()
    device = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).to("tpu")
    with pytest.warns(
        UserWarning, match="aten::linalg_eig has no tpu lowering and runs on the CPU"
    ) as warned:
        results = [torch.linalg.eig(device * 2) for _ in range(3)]
    assert len([warning for warning in warned if "linalg_eig" in str(warning.message)]) == 1
    for values, vectors in results:
        assert values.is_tpu
        assert vectors.is_tpu
        assert values.tolist() == [2, 6]
    assert torch.tpu.fallback_stats() == {"aten::linalg_eig": 3}


@pytest.mark.filterwarnings("ignore:.*no tpu lowering")
def test_an_op_without_a_lowering_writes_to_out_and_takes_part_in_autograd():
    host = torch.tensor([[2.0, 1.0], [0.0, 3.0]])
    out = tuple(torch.empty(0, dtype=torch.complex64, device="tpu") for _ in range(2))
    torch.linalg.eig(host.to("tpu"), out=out)
    assert torch.equal(out[0].cpu(), torch.linalg.eigvals(host))
    leaf = host.to("tpu").requires_grad_()
    (leaf * torch.linalg.eig(leaf.detach())[0].real).sum().backward()
    assert leaf.grad.tolist() == [[2, 3], [2, 3]]


def test_a_fallback_whose_warning_is_an_error_leaves_the_device_usable():
    torch.tpu.reset_fallback_stats()
    device = torch.tensor([[1.0, 0.0], [0.0, 3.0]]).to("tpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no tpu lowering"):
            torch.linalg.eig(device)
    assert torch.tpu.fallback_stats() == {"aten::linalg_eig": 1}
    assert torch.linalg.eig(device)[0].tolist() == [1, 3]
    torch.tpu.reset_fallback_stats()
    assert torch.tpu.fallback_stats() == {}


def test_the_precision_in_force_when_a_product_is_recorded_is_part_of_its_program() -> None:
    x = torch.ones(37, 37, device="tpu")
    torch.tpu.synchronize()
    before = torch.get_float32_matmul_precision()
    try:
        for _ in range(2):
            compiled = torch.tpu.compile_stats()["compilations"]
            torch.set_float32_matmul_precision("highest")
            first = x @ x
            torch.set_float32_matmul_precision("medium")
            second = x @ x
            torch.set_float32_matmul_precision("highest")
            torch.tpu.synchronize()
            assert torch.equal(first.cpu(), second.cpu())
        assert torch.tpu.compile_stats()["compilations"] == compiled
        third, fourth = x @ x, x @ x  # other settings than above: another program
        torch.tpu.synchronize()
        assert torch.tpu.compile_stats()["compilations"] == compiled + 1
        del third, fourth
    finally:
        torch.set_float32_matmul_precision(before)


def test_lists_that_write_one_storage_twice_are_written_in_order() -> None:
    for device in ("cpu", "tpu"):
        x = torch.zeros(4, device=device)
        torch._foreach_add_([x, x], 1)
        torch._foreach_mul_([x[:2], x[1:3]], 3)
        assert x.tolist() == [6, 18, 6, 2]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what no list op can do by parts runs on the CPU
            low, high = torch.aminmax(torch.tensor([3.0, -1.0], device=device), out=(x[0], x[1]))
        assert (low.item(), high.item(), x.tolist()) == (-1, 3, [-1, 3, 6, 2])


def test_lists_of_tensors_on_two_devices_are_taken_one_by_one() -> None:
    tensors = [torch.zeros(2, device="tpu"), torch.zeros(())]
    torch._foreach_add_(tensors, 1)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], 1]
    assert [tensor.device.type for tensor in tensors] == ["tpu", "cpu"]


def test_a_cpu_tensor_is_not_written_by_an_op_on_the_device() -> None:
    one = torch.ones((), device="tpu")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(()).add_(one)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(()).mul_(one)
