"""Each compilation is logged with its cause: what changed, of which argument, at which Python line."""

import itertools
import logging
import re
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.fresh_process import run_python
from tpu_backend.compiled.made_again import cause_of_guard
from tpu_backend.runtime import causes as cause_finding

LINE_OF_MODEL = "return self.down(torch.relu(self.up(x)))"


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


@pytest.fixture
def causes(caplog) -> Callable[[Callable[[], object]], list[str]]:
    """What the log says of the compilations that a call needs."""

    def of(run: Callable[[], object]) -> list[str]:
        torch.tpu.flush()
        caplog.clear()
        before = torch.tpu.compile_stats()["compilations"]
        with caplog.at_level(logging.INFO, "tpu_backend.compile"):
            run()
            torch.tpu.synchronize()
        lines = [record.getMessage() for record in caplog.records if record.name == "tpu_backend.compile"]
        assert len(lines) == torch.tpu.compile_stats()["compilations"] - before
        assert lines == [str(each) for each in torch.tpu.compilations()[-len(lines) :]] or not lines
        return lines

    return of


_widths = itertools.count(1009)  # another one for each test, and none of other files: not met before


@pytest.fixture
def model() -> Model:
    return Model(next(_widths)).to("tpu")


def train(model: Model, x: Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()
    torch.tpu.flush()


@pytest.fixture
def seen(model, causes) -> Tensor:
    """A batch that the model was trained on."""
    x = torch.randn(8, 6, device="tpu")
    causes(lambda: train(model, x))
    return x


def test_shape(model, causes, seen):
    part = seen[:5].clone()
    torch.tpu.flush()
    (line,) = causes(lambda: train(model, part))
    assert "because of shape: " in line
    assert "is float32[5, 6], was float32[8, 6]" in line
    assert line.endswith(LINE_OF_MODEL)
    assert f"{__file__}:" in line
    assert not causes(lambda: train(model, seen))


def test_dtype(model, causes, seen):
    model.bfloat16()
    half = seen.bfloat16()
    torch.tpu.flush()
    (line,) = causes(lambda: train(model, half))
    assert "because of dtype: " in line
    assert f"self of tpu::linear is bfloat16{list(half.shape)}, was float32[" in line
    assert line.endswith(LINE_OF_MODEL)


def test_static_number(causes):
    x, kept = torch.rand(8, 6, device="tpu"), []

    def power(exponent: float) -> None:
        torch.tpu.flush()
        kept.append(x.pow(exponent).sum())
        torch.tpu.flush()

    causes(lambda: power(2.0))
    (line,) = causes(lambda: power(3.0))
    assert "because of static number: exponent of aten::pow.Tensor_Scalar is 3.0, was 2.0, at " in line
    assert line.endswith("kept.append(x.pow(exponent).sum())")


def test_requires_grad(model, causes, seen):
    model.up.weight.requires_grad_(False)
    (line,) = causes(lambda: train(model, seen))
    assert "because of requires_grad: " in line
    assert "requires no gradient, and did" in line
    assert line.endswith(LINE_OF_MODEL)


def test_autocast(model, causes, seen):
    def under_autocast() -> None:
        with torch.autocast("tpu"):
            train(model, seen)

    (line,) = causes(under_autocast)
    assert "because of autocast: it is on, and was off: " in line
    assert line.endswith(LINE_OF_MODEL)


def test_autocast_by_its_argument(causes):
    width = next(_widths)
    layer, x = nn.Linear(width, width).to("tpu"), torch.randn(3, width, device="tpu")

    def use(enabled: bool) -> None:
        with torch.autocast("tpu", enabled=enabled):
            layer(x).tolist()

    causes(lambda: use(False))
    (line,) = causes(lambda: use(True))
    assert "because of autocast: it is on, and was off: " in line
    assert line.endswith("layer(x).tolist()")
    assert not causes(lambda: use(False))


def test_what_changes_under_autocast_is_compared_with_what_was_under_autocast(causes):
    width = next(_widths)
    layer, x = nn.Linear(width, width).to("tpu"), torch.randn(3, width, device="tpu")

    def use(values: Tensor, dtype: torch.dtype = torch.bfloat16, enabled: bool = True) -> None:
        torch.tpu.flush()
        with torch.autocast("tpu", dtype=dtype, enabled=enabled):
            layer(values).sum().item()

    causes(lambda: use(x, enabled=False))
    causes(lambda: use(x))
    (line,) = causes(lambda: use(x, torch.float16))
    assert "because of dtype: out of tpu::copy is float16" in line
    fewer = x[:2].clone()
    (line,) = causes(lambda: use(fewer))
    assert "because of shape: source of tpu::copy is float32[2, " in line
    with torch.autocast("tpu"):
        causes(lambda: layer(x).sum().item())
        (line,) = causes(lambda: layer(x).sum().item())
    assert "because of autocast: 2 fewer casts" in line
    layer.bfloat16()
    half = x.bfloat16()
    (line,) = causes(lambda: use(half, enabled=False))
    assert "because of dtype: self of tpu::linear is bfloat16" in line


def test_a_finalizer_may_compile_while_a_cause_is_looked_for(monkeypatch):
    likeness, compiled = cause_finding._likeness, []

    def interrupted(*programs):
        if not compiled:
            compiled.append(width := next(_widths) + 5000)  # first: a cause is looked for of this one, too
            torch.arange(width, device="tpu").sum().item()
        return likeness(*programs)

    for _ in range(2):
        (torch.ones(next(_widths), device="tpu") * 2).sum().item()
    monkeypatch.setattr(cause_finding, "_likeness", interrupted)
    width = next(_widths)
    assert (torch.ones(width, device="tpu") * 2).sum().item() == 2 * width
    assert compiled


def test_mode(model, causes, seen):
    def strictly() -> None:
        with torch.tpu.eager_mode("strict"):
            train(model, seen)

    lines = causes(strictly)
    assert lines
    for line in lines:
        assert re.search("because of mode: it is strict, and was fused: (aten|tpu)::", line)
        assert line.endswith('with torch.tpu.eager_mode("strict"):')


def test_what_another_mode_or_precision_had_in_between_is_no_cause(causes):
    x, w = torch.randn(3, 37, device="tpu"), torch.randn(37, 5, device="tpu")

    def total() -> float:
        return (x @ w).sum().item()

    def in_between() -> None:
        with torch.tpu.eager_mode("strict"):
            total()
        torch.set_float32_matmul_precision("medium")
        total()
        torch.set_float32_matmul_precision("highest")

    causes(total)
    causes(in_between)
    (longer,) = causes(lambda: (x @ w).sum().exp().item())
    assert "because of operations: aten::exp and what follows is new" in longer
    (other,) = causes(lambda: (x @ w).mean().exp().sqrt().item())
    assert "because of mode" not in other


def test_the_first_program_of_its_kind_says_so(causes):
    x = torch.randn(3, 7, 5, device="tpu")
    torch.tpu.flush()
    (line,) = causes(lambda: x.cumsum(-1).erfc().tolist())
    assert "because of first: " in line


def test_results_that_somebody_keeps(causes):
    x = torch.rand(9, 4, device="tpu")
    kept = []

    def logistic(keep: bool) -> None:
        torch.tpu.flush()
        inner = x.neg().exp() + 1
        result = inner.reciprocal()
        if keep:
            kept.append(inner)
        del inner
        torch.tpu.flush()
        del result

    causes(lambda: logistic(False))
    (line,) = causes(lambda: logistic(True))
    assert "because of results: 1 more of its results kept, one that aten::add" in line
    assert "inner = x.neg().exp() + 1" in line


def scaled(x: Tensor, scale: object) -> Tensor:
    return x.sin() * (3 if scale in (3, "three") else 2)


SCALED_LINE = "def scaled(x: Tensor, scale: object) -> Tensor:"  # Python is at no line of a compiled function


@pytest.mark.parametrize(
    ("scale", "change", "cause"),
    [
        (2, lambda x: (x[:3].clone(), 2), "shape: size 0 of x is 3, was 4"),
        (2, lambda x: (x[0].clone(), 2), "shape: x has 1 dims, had 2"),
        (2, lambda x: (x.bfloat16(), 2), "dtype: x is bfloat16, was float32"),
        (2, lambda x: (x.clone().requires_grad_(), 2), "requires_grad: x requires a gradient, and did not"),
        (2, lambda x: (x, 3), "static number: scale is 2 no more"),
        ("two", lambda x: (x, "three"), "argument: scale is 'two' no more"),
    ],
)
def test_a_graph_that_torch_compile_made_again(causes, scale, change, cause):
    torch._dynamo.reset()
    fast = torch.compile(scaled, dynamic=False)
    x = torch.rand(4, 11, device="tpu")
    causes(lambda: fast(x, scale).tolist())
    changed = change(x)
    torch.tpu.flush()
    (line,) = causes(lambda: fast(*changed).tolist())
    assert f"because of {cause}, so that torch.compile made tpu_graph::" in line
    assert line.endswith(SCALED_LINE)


def test_autocast_around_torch_compile(causes):
    torch._dynamo.reset()
    fast, x = torch.compile(scaled), torch.rand(4, 11, device="tpu")
    causes(lambda: fast(x, 2).tolist())
    with torch.autocast("tpu"):
        (line,) = causes(lambda: fast(x, 2).tolist())
    assert "because of autocast: autocast changed, so that torch.compile made tpu_graph::" in line
    assert line.endswith(SCALED_LINE)


def test_the_graph_of_another_phase_is_no_cause(causes):
    """Training and evaluation have graphs of their own: a new batch size is told as such in both."""
    torch._dynamo.reset()
    model = Model(next(_widths)).to("tpu")
    fast = torch.compile(model, dynamic=False)

    def train_on(x: Tensor) -> None:
        model.zero_grad()
        fast(x).square().mean().backward()
        torch.tpu.flush()

    def evaluate(x: Tensor) -> None:
        with torch.no_grad():
            fast(x).tolist()

    x = torch.randn(8, 6, device="tpu")
    smaller = x[:5].clone()
    causes(lambda: train_on(x))
    causes(lambda: train_on(x))
    (line,) = causes(lambda: evaluate(x))
    assert "because of graph: gradient mode changed, so that" in line
    for run, graph in ((train_on, "forward"), (evaluate, "inference")):
        (line,) = causes(lambda run=run: run(smaller))
        assert (
            f"because of shape: size 0 of x is 5, was 8, so that torch.compile made tpu_graph::{graph}_"
            in line
        )


def test_a_backward_graph_in_a_program_of_its_own(causes):
    torch._dynamo.reset()
    fast = torch.compile(scaled, dynamic=False)

    def use(x: Tensor) -> None:
        loss = fast(x, 2).sum()
        loss.item()
        loss.backward()
        x.grad.tolist()

    batches = [torch.rand(size, 11, device="tpu", requires_grad=True) for size in (4, 3)]
    torch.tpu.synchronize()
    causes(lambda: use(batches[0]))
    forward, backward = causes(lambda: use(batches[1]))
    for line, graph in ((forward, "forward"), (backward, "backward")):
        assert (
            f"because of shape: size 0 of x is 3, was 4, so that torch.compile made tpu_graph::{graph}_"
            in line
        )


def test_a_frozen_parameter_is_the_cause_although_sizes_differ_from_the_last_graph(causes):
    torch._dynamo.reset()
    layer = nn.Linear(7, next(_widths)).to("tpu")
    fast = torch.compile(lambda x: layer(x).sum(), dynamic=False)
    batches = [torch.rand(size, 7, device="tpu") for size in (8, 5)]
    for x in batches:
        causes(lambda x=x: fast(x).item())
    layer.weight.requires_grad_(False)
    (line,) = causes(lambda: fast(batches[0]).item())
    assert "because of requires_grad: layer.weight requires no gradient, and did" in line


def test_parameters_are_named_as_in_the_program():
    name = "self._modules['up']._parameters['weight']"
    guard = f"0/0: tensor '{name}' requires_grad mismatch. expected requires_grad=1"
    assert cause_of_guard(guard) == ("requires_grad", "self.up.weight requires no gradient, and did")
    state = "0/1: GLOBAL_STATE changed: grad_mode autocast(tpu)_enabled autocast(tpu)_dtype "
    assert cause_of_guard(state) == ("autocast", "gradient mode and autocast changed")
    assert cause_of_guard("0/2: len(x) > 3  # in f\nUser stack") == ("graph", "Dynamo says: len(x) > 3")
    assert cause_of_guard("0/1: G['SCALE'] == 2") == ("static number", "SCALE is 2 no more")
    assert cause_of_guard("0/1: d['a b'] == 'x'") == ("argument", "d['a b'] is 'x' no more")


def programs_and_warnings(run: Callable[[int], object], count: int) -> tuple[int, list[str]]:
    before = torch.tpu.compile_stats()["compilations"]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(count):
            run(number)
    texts = [str(each.message) for each in said if "programs were compiled because of" in str(each.message)]
    return torch.tpu.compile_stats()["compilations"] - before, texts


def test_no_grad_is_advised_only_where_it_is_off():
    def drawn(n: int) -> float:  # random numbers are not padded
        return torch.zeros(300 + n, device="tpu").uniform_().sum().item()

    with torch.no_grad():
        _, (text,) = programs_and_warnings(drawn, 12)
    assert "pad it to a few sizes" in text
    assert "torch.no_grad()" not in text


def test_many_lengths_are_warned_of_and_padding_them_helps():
    def total(x: Tensor) -> float:
        return (x * 3).sum().item()

    run = lambda n: total(torch.ones(300 + n).to("tpu"))  # noqa: E731
    num_programs, (text, later) = programs_and_warnings(run, 20)
    assert num_programs == 20
    assert "9 programs" in text
    assert "18 programs" in later, "again when they are twice as many"
    # Whether the first of them counts depends on what this process has compiled before.
    assert re.search(
        r" shape: self of aten::mul.Tensor is float32\[30[89]\], was float32\[30[78]\], at ", text
    )
    assert "pad it to a few sizes, such as the next multiple of 64: a size is compiled once" in text
    assert "where no gradients are wanted, sizes share programs under torch.no_grad()" in text

    def padded(n: int) -> None:
        x = torch.ones(500 + n)
        (F.pad(x, (0, -len(x) % 64)).to("tpu") * 5).sum().item()

    num_programs, texts = programs_and_warnings(padded, 12)
    assert num_programs <= 1
    assert not texts


def test_masks_of_many_counts_are_warned_of_and_weighing_by_the_mask_helps():
    width = next(_widths)

    def loss(n: int, mean: Callable[[Tensor, Tensor], Tensor]) -> float:
        x = torch.ones(width, device="tpu", requires_grad=True)
        value = mean(x * 7, (torch.arange(width) < n).to("tpu"))
        value.backward()
        return value.item()

    num_programs, (text,) = programs_and_warnings(lambda n: loss(n + 9, lambda x, mask: x[mask].mean()), 12)
    assert num_programs >= 12
    assert "from x[mask], keep all of x and multiply by the mask: (x * mask).sum() / mask.sum()" in text

    weigh = lambda x, mask: (x * mask).sum() / mask.sum()  # noqa: E731
    num_programs, texts = programs_and_warnings(lambda n: loss(n + 9, weigh), 12)
    assert num_programs <= 2
    assert not texts


def test_layers_of_many_sizes_are_nothing_to_warn_of_and_a_loop_without_transfers_is():
    widths = [next(_widths) for _ in range(12)]
    layers = [nn.Linear(given, made) for given, made in itertools.pairwise(widths)]
    model = nn.Sequential(*layers).to("tpu")

    def step(_: int) -> float:
        loss = model(torch.ones(2, widths[0]).to("tpu")).sum()
        loss.backward()
        return loss.item()

    def without_transfers(_: int) -> None:
        for size in range(2000, 2150):
            torch.empty(size, device="tpu").cos()

    with torch.tpu.eager_mode("strict"):
        num_programs, texts = programs_and_warnings(step, 3)
        assert num_programs > 20
        assert not texts
        num_programs, (text,) = programs_and_warnings(without_transfers, 1)
    assert num_programs >= 150
    assert "129 programs were compiled because of shape: self of aten::cos is" in text


def test_memory_of_other_inputs_that_is_taken_over_is_a_cause_of_its_own(monkeypatch) -> None:
    met, program = [], cause_finding._program
    monkeypatch.setattr(
        cause_finding,
        "_program",
        lambda description, mode: met.append(description) or program(description, mode),
    )
    x = torch.ones(next(_widths), device="tpu")
    torch.tpu.flush()
    (x * 3).cos().cpu()
    taken_over = met[-1] | {"donated": met[-1]["inputs"]}
    assert met[-1]["donated"] == []
    (cause,) = cause_finding.causes_of([taken_over], "fused")
    assert cause.kind == "memory"
    assert cause.text == "results take over that of 1 inputs, and took that of 0"


@pytest.mark.parametrize(("tpu_logs", "num_lines"), [("", 0), ("compile", 1)])
def test_a_script_that_logs_at_info_has_lines_of_programs_if_it_asks_for_them(tpu_logs, num_lines) -> None:
    done = run_python(
        """
        import logging, sys, torch
        logging.basicConfig(level=logging.INFO, stream=sys.stdout)
        torch.ones(3, device="tpu").cos().cpu()
        """,
        TPU_LOGS=tpu_logs,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled ") == num_lines
