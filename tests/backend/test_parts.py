"""Steps in parts: what repeats in the stream shares a program, and the numbers are those of one program."""

import textwrap
import threading
import time
from collections import deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.backend.fresh_process import run_python
from tpu_backend.runtime import causes
from tpu_backend.runtime.parts import order_with_late_gathers
from tpu_backend.runtime.tape import Tape


class Block(nn.Module):
    def __init__(self, width: int, dropout: float):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.narrow, self.dropout = nn.Linear(2 * width, width), nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = F.gelu(self.wide(self.norm(x))) * torch.sigmoid(x.mean(-1, keepdim=True))
        return x + self.dropout(torch.tanh(self.narrow(y)) - y[..., : x.shape[-1]].exp().log1p())


def model_of(layers: int, width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, dropout) for _ in range(layers)), nn.Linear(width, 4))


def train(
    model: nn.Module, steps: int = 3, device: str = "tpu", width: int = 8, fused: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and what the model came to."""
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused, foreach=not fused)
    torch.manual_seed(1)
    inputs = torch.randn(steps, 6, width)
    labels = torch.randint(4, (steps, 6))
    losses = []
    torch.manual_seed(2)
    for step in range(steps):
        loss = F.cross_entropy(model(inputs[step].to(device)), labels[step].to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [each.item() for each in losses], {n: t.cpu() for n, t in model.state_dict().items()}


def compilations() -> int:
    return torch.tpu.compile_stats()["compilations"]


@pytest.mark.parametrize("fused_optimizer", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_numbers_are_those_of_one_program(fused_optimizer, dropout):
    losses, state = train(model_of(4, dropout=dropout), fused=fused_optimizer)
    with torch.tpu.eager_mode("fused", parts="always"):
        in_layers, state_in_layers = train(model_of(4, dropout=dropout), fused=fused_optimizer)
    torch.testing.assert_close(torch.tensor(in_layers), torch.tensor(losses), rtol=1e-5, atol=0)
    for name, expected in state.items():
        torch.testing.assert_close(state_in_layers[name], expected, rtol=1e-4, atol=1e-5, msg=name)
    assert all(state_in_layers[f"{layer}.calls"] == 3 for layer in range(4))


def programs_of_a_run(layers: int, width: int) -> tuple[int, int]:
    """How many were compiled, and the operations of the longest."""
    before = compilations()
    with torch.tpu.eager_mode("fused", parts="always"):
        train(model_of(layers, width), width=width)
    compiled = compilations() - before
    return compiled, max(len(each.operations) for each in torch.tpu.compilations()[-compiled:])


def test_more_layers_take_no_more_programs_and_no_longer_ones():
    few, longest_of_few = programs_of_a_run(10, 10)
    many, longest_of_many = programs_of_a_run(15, 12)
    assert many <= few
    assert longest_of_many <= longest_of_few


def test_steps_whose_gradients_are_accumulated_are_cut_at_their_layers_too():
    model = model_of(12, width=18).to("tpu")
    inputs, labels = torch.randn(6, 18), torch.randint(4, (6,))
    before = compilations()
    with torch.tpu.eager_mode("fused", parts="always"):
        for _ in range(5):
            F.cross_entropy(model(inputs.to("tpu")), labels.to("tpu")).backward()
        torch.tpu.flush()
    compiled = torch.tpu.compilations()[before - compilations() :]
    accumulated = [parameter.grad.cpu() for parameter in model.parameters()]
    assert max(len(each.operations) for each in compiled) < 120  # a block has 17, and 33 backward
    model.zero_grad()
    (5 * F.cross_entropy(model(inputs.to("tpu")), labels.to("tpu"))).backward()
    for parameter, found in zip(model.parameters(), accumulated, strict=True):
        torch.testing.assert_close(found, parameter.grad.cpu(), rtol=1e-4, atol=1e-6)


def test_the_optimizers_lists_are_taken_apart_by_layers():
    before = compilations()
    with torch.tpu.eager_mode("fused", parts="always"):
        train(model_of(6, width=14), steps=1, width=14)
    updates = [
        each.operations
        for each in torch.tpu.compilations()[before - compilations() :]
        if any("fused_adamw" in operation for operation in each.operations)
    ]
    assert len(updates) == 2  # of a block's tensors, and of the last layer's


def test_the_one_program_that_was_prepared_is_not_compiled_again():
    wait_for_threads()
    model = model_of(12, width=16).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs = torch.randn(6, 16, device="tpu")

    def step() -> None:
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.synchronize()

    with torch.tpu.eager_mode("fused", parts="always"):
        step()  # makes the optimizer's state
    with torch.tpu.eager_mode("fused", parts="prepare"):
        step()
        made = torch.tpu.compilations()
        assert not torch.tpu.is_compiling_ahead()
        step()
    with torch.tpu.eager_mode("fused"):
        step()
        (whole,) = (each for each in torch.tpu.compilations() if each.number > made[-1].number)
        assert len(whole.operations) > 12 * 12
        after = compilations()
        step()
        assert compilations() == after


def wait_for_threads() -> None:
    while torch.tpu.is_compiling_ahead():
        time.sleep(0.01)


def longest_program_since(number: int) -> int:
    """Operations."""
    return max((len(each.operations) for each in torch.tpu.compilations() if each.number > number), default=0)


def number_of_last_program() -> int:
    torch.tpu.synchronize()
    return max((each.number for each in torch.tpu.compilations()), default=0)


def test_fused_mode_may_begin_in_parts():
    wait_for_threads()
    model = model_of(5, width=20).to("tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(6, 20, device="tpu")
    before = number_of_last_program()

    def steps(count: int) -> None:
        for _ in range(count):
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.tpu.flush()

    with torch.tpu.eager_mode("fused", parts="first"):
        steps(31)
        in_layers = compilations()
        assert 0 < longest_program_since(before) < 5 * 12
        assert not torch.tpu.is_compiling_ahead()
        steps(225)  # at the first of them a thread begins
        assert compilations() == in_layers
        steps(1)
        assert compilations() == in_layers + 1
        whole = torch.tpu.compilations()[-1]
        assert len(whole.operations) > 5 * 12
        assert whole.cause.kind == "whole"
        steps(3)
        assert compilations() == in_layers + 1
    steps(1)
    assert compilations() == in_layers + 1


def test_steps_whose_one_program_is_refused_stay_in_parts(monkeypatch):
    from tpu_backend.runtime import compiler

    lower = compiler.lower_segment

    def refuse_large(description, *arguments):
        if len(description["circumstances"]) > 4 * 12:
            raise RuntimeError("too large for the test")
        return lower(description, *arguments)

    monkeypatch.setattr(compiler, "lower_segment", refuse_large)
    model = model_of(10, width=32).to("tpu").requires_grad_(False)
    inputs = torch.randn(6, 32, device="tpu")
    with torch.tpu.eager_mode("fused", parts="first"):
        expected = model(inputs).cpu()
        for _ in range(255):
            model(inputs).cpu()
        with pytest.warns(UserWarning, match="stay so: .* cannot be compiled .*too large"):
            assert torch.equal(model(inputs).cpu(), expected)
        monkeypatch.undo()
        after = compilations()
        assert torch.equal(model(inputs).cpu(), expected)
        assert compilations() == after


def test_steps_stay_in_parts_while_their_one_program_is_compiled_for_long(monkeypatch, capfd):
    from tpu_backend.runtime import compiler

    lower, may_go_on = compiler.lower_segment, threading.Event()

    def takes_long(description, *arguments):
        if len(description["circumstances"]) > 4 * 12:
            may_go_on.wait(60)
        return lower(description, *arguments)

    wait_for_threads()
    monkeypatch.setattr(compiler, "lower_segment", takes_long)
    monkeypatch.setattr(compiler, "_LONGEST_WAIT", 0.05)
    model = model_of(10, width=24).to("tpu").requires_grad_(False)
    inputs = torch.randn(6, 24, device="tpu")
    with torch.tpu.eager_mode("fused", parts="first"):
        expected = model(inputs).cpu()
        in_layers = compilations()
        for _ in range(260):
            assert torch.equal(model(inputs).cpu(), expected)
        assert compilations() == in_layers
        assert capfd.readouterr().err.count("steps stay in parts until it is there") == 1
        may_go_on.set()
        wait_for_threads()
        torch.testing.assert_close(model(inputs).cpu(), expected)
        assert compilations() == in_layers + 1
        assert torch.tpu.compilations()[-1].cause.kind == "whole"


def test_steps_in_parts_of_another_time_count():
    wait_for_threads()
    model = model_of(10, width=34).to("tpu").requires_grad_(False)
    inputs = torch.randn(6, 34, device="tpu")
    with torch.tpu.eager_mode("fused", parts="always"):
        for _ in range(3):
            model(inputs).cpu()
    assert not torch.tpu.is_compiling_ahead()
    with torch.tpu.eager_mode("fused", parts="prepare"):
        model(inputs).cpu()
        assert torch.tpu.is_compiling_ahead()


def test_what_nobody_sees_is_not_run_in_parts_either():
    x = torch.ones(3, device="tpu")
    torch.tpu.flush()
    before = torch.tpu.compile_stats()["segments_run"]
    with torch.tpu.eager_mode("fused", parts="first"):
        y = x * 2
        for _ in range(12):
            y = (y + x).sin().cos().exp().tanh().sigmoid().sqrt().log1p().abs().neg().square() - x
        del y
        torch.tpu.flush()
    assert torch.tpu.compile_stats()["segments_run"] == before


def test_a_program_that_is_there_is_run_at_once():
    model = model_of(10, width=36).to("tpu").requires_grad_(False)
    inputs = torch.randn(6, 36, device="tpu")
    with torch.tpu.eager_mode("fused"):
        expected = model(inputs).cpu()
    after = compilations()
    with torch.tpu.eager_mode("fused", parts="first"):
        assert torch.equal(model(inputs).cpu(), expected)
    assert compilations() == after


@pytest.mark.parametrize("deterministic", [False, True])
def test_fused_mode_by_its_name_and_what_is_deterministic_are_one_program_at_once(deterministic):
    model = model_of(5, width=22 + 2 * deterministic).to("tpu")
    inputs = torch.randn(6, 22 + 2 * deterministic, device="tpu")
    before = number_of_last_program()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with torch.tpu.eager_mode("fused", parts="first" if deterministic else "never"):
            model(inputs).square().mean().backward()
            torch.tpu.flush()
    finally:
        torch.use_deterministic_algorithms(False)
    assert longest_program_since(before) > 5 * 12


def test_a_captured_step_is_one_program_at_once():
    model = model_of(5, width=26).to("tpu")
    before = number_of_last_program()

    @torch.tpu.capture
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return model(inputs).square().mean()

    with torch.tpu.eager_mode("fused", parts="first"):
        step(torch.randn(6, 26, device="tpu"))
        torch.tpu.flush()
    assert longest_program_since(before) > 5 * 12


def test_the_optimizer_of_a_compiled_model_is_not_taken_apart():
    model = model_of(5, width=30).to("tpu")
    called = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
    inputs = torch.randn(6, 30, device="tpu")
    with torch.tpu.eager_mode("fused", parts="first"):
        for _ in range(2):
            before = compilations()
            called(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.tpu.flush()
    assert compilations() == before + 1  # the optimizer's state was made in the first step


@pytest.mark.parametrize("fused", [False, True])
def test_the_second_step_of_an_optimizer_compiles_nothing(fused):
    """In the first its state is made, by other parts: those of the update can take its memory too."""
    width = 34 + 4 * fused
    model = model_of(5, width).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=not fused, fused=fused)
    inputs, compiled = torch.randn(6, width, device="tpu"), []
    with torch.tpu.eager_mode("fused", parts="always"):
        for _ in range(2):
            before = compilations()
            model(inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.tpu.flush()
            compiled.append(compilations() - before)
    assert compiled[0] > 3
    assert compiled[1] == 0


@pytest.mark.parametrize("named", [None, "fused"])
def test_a_process_begins_in_parts_unless_its_mode_is_named(named):
    script = """
    import torch
    x = torch.ones(2, device="tpu")
    y = x * 2
    for _ in range(12):
        y = (y + x).sin().cos().exp().tanh().sigmoid().sqrt().log1p().abs().neg().square() - x
    y.sum().item()
    print(torch.tpu.get_eager_mode(), max(len(each.operations) for each in torch.tpu.compilations()) > 100)
    """
    done = run_python(script, **({} if named is None else {"TPU_EAGER_MODE": named}))
    assert done.stdout == f"fused {named is not None}\n"
    assert "waiting" not in done.stderr  # there is nothing to wait for at its end


def test_parts_of_one_step_are_not_compared_with_each_other(monkeypatch):
    model, kinds = model_of(4, width=22).to("tpu"), []
    torch.tpu.flush()
    monkeypatch.setattr(causes, "_compiled", deque())  # nothing like it was compiled yet
    with torch.tpu.eager_mode("fused", parts="always"):
        for rows in (6, 7):
            before = torch.tpu.compilations()[-1].number
            model(torch.randn(rows, 22, device="tpu")).square().mean().backward()
            torch.tpu.flush()
            new = [each for each in torch.tpu.compilations() if each.number > before]
            kinds.append({each.cause.kind for each in new})
    assert kinds == [{"first"}, {"shape"}]


def test_parts_are_refused_in_another_mode():
    with pytest.raises(ValueError, match=r"parts='first' in mode 'strict': only \"fused\" runs"):
        torch.tpu.eager_mode("strict", parts="first")


def test_an_unknown_value_of_parts_is_refused():
    with pytest.raises(
        ValueError, match=r"unknown parts='some': expected one of never, first, prepare, always"
    ):
        torch.tpu.eager_mode("fused", parts="some")


def test_a_program_that_fails_leaves_an_error_in_what_depends_on_it(monkeypatch):
    from tpu_backend.runtime import compiler

    def refuse(*arguments):
        raise RuntimeError("refused for the test")

    model = model_of(4, width=18).to("tpu")
    inputs = torch.randn(6, 18, device="tpu")
    torch.tpu.synchronize()
    with torch.tpu.eager_mode("fused", parts="always"):
        output = model(inputs)
        monkeypatch.setattr(compiler, "lower_segment", refuse)
        with pytest.raises(RuntimeError, match="refused for the test"):
            output.sum().item()
        monkeypatch.undo()
        with pytest.raises(
            RuntimeError, match=r"was to be computed by a program that failed:\nRuntimeError: r"
        ):
            output.cpu()
        model[0].calls.zero_()
        assert torch.isfinite(model_of(4, width=18).to("tpu")(inputs).sum()).item()


def test_indices_are_checked_in_every_part():
    table = torch.ones(5, 4, device="tpu")
    with torch.tpu.eager_mode("fused", parts="always"):
        x = torch.zeros(3, 4, device="tpu")
        for layer in range(4):
            index = torch.tensor([0, 1, 7 if layer == 2 else 2], device="tpu")
            x = table[index] + x.sin().cos().exp().log().tanh().abs().neg().sqrt().square().ceil().floor()
        with pytest.raises(IndexError, match="index 7 is out of bounds"):
            torch.tpu.synchronize()


def of_both(step):
    """What `step(device)` returns, on the CPU and, in parts, on the device."""
    expected = step("cpu")
    with torch.tpu.eager_mode("fused", parts="always"):
        found = step("tpu")
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual.cpu(), wanted)


def eight(device: str, start: float = 0.0) -> list[torch.Tensor]:
    return [torch.arange(4.0, device=device) + start + each for each in range(8)]


def test_lists_whose_elements_meet_are_not_taken_apart():
    def backwards(device):
        tensors = eight(device)
        torch._foreach_add_(tensors, 1)
        torch._foreach_mul_(tensors[::-1], eight(device, 2))
        return torch._foreach_sub(tensors, tensors[1:] + tensors[:1])

    def by_one_of_them(device):
        tensors = eight(device, 1)
        norms = torch._foreach_norm(tensors)
        torch._foreach_div_(tensors, norms[3])
        return tensors

    of_both(backwards)
    of_both(by_one_of_them)


def test_lists_of_parts_of_one_buffer_are_not_taken_apart():
    """Beside lists that are."""

    def update(device):
        whole = torch.arange(160.0, device=device)
        tensors, others = (
            list(whole.split(4)),
            [torch.arange(4.0, device=device) + each for each in range(40)],
        )
        for lists in (tensors, others):
            torch._foreach_add_(lists, [each + 1 for each in others])
            torch._foreach_mul_(lists, 1.5)
            torch._foreach_sqrt_(lists)
            torch._foreach_add_(lists, 2.0)
        return [whole, *others]

    before = torch.tpu.compile_stats()["segments_in_parts"]
    of_both(update)
    assert torch.tpu.compile_stats()["segments_in_parts"] > before


def entry_of(overload, links, made):
    return SimpleNamespace(summary=SimpleNamespace(overload=overload), links=links, made=made)


def test_gathers_come_where_they_are_needed():
    gather, scatter = "tpu_collective::all_gather", "tpu_collective::reduce_scatter"
    entries = [
        entry_of("aten::cat", [0, 1], [10]),
        entry_of(gather, [10], [11]),  # of the layer after this one
        entry_of("tpu::linear", [2, 12], [13]),
        entry_of("aten::cat", [1], [14]),
        entry_of(gather, [14], [15]),  # read by another gather alone
        entry_of(gather, [15], [16]),
        entry_of(scatter, [13], [17]),
        entry_of("aten::mul.Tensor", [11, 13], [18]),
        entry_of("aten::add.Tensor", [16, 18], [19]),
        entry_of(gather, [3], [20]),  # read by nobody
    ]
    assert list(order_with_late_gathers(Tape(entries, {}))) == [2, 6, 0, 1, 7, 3, 4, 5, 8, 9]
    assert list(order_with_late_gathers(Tape(entries[6:], {}))) == [0, 1, 2, 3]


def test_numbers_that_differ_in_a_list_and_numbers_that_are_the_same():
    def update(device):
        tensors = eight(device)
        for numbers in ([2.0] * 8, [float(each) for each in range(8)], [0.0, -0.0] * 4):
            torch._foreach_addcdiv_(tensors, eight(device, 1), eight(device, 3), numbers)
        return tensors

    of_both(update)


def test_what_a_part_writes_twice_and_a_later_one_reads_in_between():
    def count(device):
        calls, seen = torch.zeros(3, device=device), torch.zeros(3, device=device)
        for _ in range(5):
            calls.add_(1)
            before = calls * 2
            calls.mul_(3).add_(before).sub_(1)
            seen.add_(before).mul_(0.5).add_(calls.sin().cos().square().exp().log1p())
            calls.neg_().abs_()
        return [calls, seen]

    of_both(count)
    of_both(count)


def test_where_nothing_repeats_there_is_one_program():
    x = torch.ones(5, 5, device="tpu")
    torch.tpu.synchronize()
    segments = torch.tpu.compile_stats()["segments_run"]
    with torch.tpu.eager_mode("fused", parts="always"):
        y = torch._foreach_add([x, x[:2], x[0]], 1)
        z = y[0].sum() + y[1].prod() + y[2].mean() + torch.stack(torch._foreach_norm([x, x[0]])).max()
        assert z.item() == pytest.approx(50 + 1024 + 2 + 5)
    assert torch.tpu.compile_stats()["segments_run"] == segments + 1


def test_ctrl_c_while_the_first_part_is_compiled_loses_nothing(monkeypatch):
    from tpu_backend.runtime import ahead

    def interrupt(*arguments):
        raise KeyboardInterrupt

    model = model_of(4, width=20).to("tpu")
    inputs = torch.randn(6, 20, device="tpu")
    torch.tpu.synchronize()
    with torch.tpu.eager_mode("fused", parts="always"):
        output = model(inputs).sum()
        with monkeypatch.context() as patched:
            patched.setattr(ahead, "result", interrupt)
            with pytest.raises(KeyboardInterrupt):
                output.item()
        again = model(inputs).sum().item()
        assert output.item() == pytest.approx(again, rel=1e-6)
        assert model[0].calls.item() == 2


BEGIN = """
import time, torch
from tpu_backend.runtime import ahead
torch.ones(1, device="tpu").sum().item()
description = {"offsets": [], "offset_is_input": [], "circumstances": None}
ahead.begin(description, lambda _: time.sleep(SECONDS))
time.sleep(0.5)
"""


def test_ctrl_c_while_later_parts_are_compiled_loses_nothing(monkeypatch):
    from tpu_backend.runtime import ahead

    def interrupt(*arguments):
        raise KeyboardInterrupt

    with torch.tpu.eager_mode("fused", parts="first"):
        model = model_of(8, width=38).to("tpu")
        inputs = torch.randn(6, 38, device="tpu")
        loss = model(inputs).sum()
        loss.backward()
        with monkeypatch.context() as patched:
            patched.setattr(ahead, "wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                loss.item()
        assert torch.isfinite(loss).item()
        assert all(torch.isfinite(each.grad).all() for each in model.parameters())


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("raise ValueError('mine')", 1)]
)
def test_the_end_of_a_process_does_not_wait_for_a_compilation(end, code):
    script = "import atexit\natexit.register(print, 'kept')\n" + BEGIN.replace("SECONDS", "200") + end
    done = run_python(script, timeout=100)
    assert (done.returncode, done.stdout) == (code, "kept\n"), done.stderr
    assert "terminate" not in done.stderr
    assert ("ValueError: mine" in done.stderr) == (code == 1)


def test_the_end_of_a_process_waits_for_a_thread_that_runs_python():
    work = "[re.compile(f'({n}|b)*') for n in range(20_000)] and print('traced')"
    done = run_python("import re\n" + BEGIN.replace("time.sleep(SECONDS)", work), timeout=100)
    assert (done.returncode, done.stdout) == (0, "traced\n"), done.stderr


def test_the_command_does_not_wait_for_what_nobody_will_ask_for():
    script = """
    from tputrain.cli import command
    def main():
        print("saved")
        raise SystemExit(143)
    command.main = main
    command.run()
    """
    done = run_python(BEGIN.replace("SECONDS", "200") + textwrap.dedent(script), timeout=100)
    assert (done.returncode, done.stdout) == (143, "saved\n")
