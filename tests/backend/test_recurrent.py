"""Recurrent layers and cells on the device against the CPU: outputs, states and every gradient."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

pytestmark = pytest.mark.usefixtures("no_fallback")

BATCH, LENGTH, INPUT, HIDDEN = 3, 2, 4, 5

LAYERS: dict[str, dict[str, Any]] = {
    "one layer": {},
    "two layers, batch first": {"num_layers": 2, "batch_first": True},
    "bidirectional": {"bidirectional": True},
    "no bias": {"bias": False},
}


def _seeded(kind: type[nn.Module], *sizes: int, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(*sizes, **options)


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [leaf for item in value for leaf in _tensors(item)]


def _run(
    module: nn.Module,
    inputs: list[Tensor],
    device: str,
    forward: Callable[..., Any],
    outputs: slice = slice(None),
) -> list[Tensor]:
    """Outputs, gradients of the inputs and gradients of the parameters of a loss over the chosen outputs."""
    module = copy.deepcopy(module).to(device)
    inputs = [tensor.to(device).requires_grad_() for tensor in inputs]
    results = _tensors(forward(module, *inputs))
    loss = sum((result * result.sin()).sum() for result in results[outputs])
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(loss, [*inputs, *parameters], allow_unused=True, materialize_grads=True)
    return [tensor.detach().cpu() for tensor in [*results, *gradients]]


def _assert_same(
    module: nn.Module, inputs: list[Tensor], forward: Callable[..., Any], **options: Any
) -> None:
    expected = _run(module, inputs, "cpu", forward, **options)
    actual = _run(module, inputs, "tpu", forward, **options)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _states(kind: type[nn.Module], layers: int) -> list[Tensor]:
    return [_random(layers, BATCH, HIDDEN, seed=2 + i) for i in range(2 if kind is nn.LSTM else 1)]


def _layer(module: nn.Module, x: Tensor, *states: Tensor) -> Any:
    return module(x, states if isinstance(module, nn.LSTM) else states[0])


class Relu(nn.RNN):
    def __init__(self, *sizes: int, **options: Any):
        super().__init__(*sizes, nonlinearity="relu", **options)


KINDS = [nn.LSTM, nn.GRU, nn.RNN, Relu]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_matches_the_cpu(kind: type[nn.Module], options: dict[str, Any]) -> None:
    shape = (BATCH, LENGTH, INPUT) if options.get("batch_first") else (LENGTH, BATCH, INPUT)
    num_states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    module = _seeded(kind, INPUT, HIDDEN, **options)
    _assert_same(module, [_random(*shape), *_states(kind, num_states)], _layer)


@pytest.mark.parametrize("options", [{"proj_size": 2}, {"dropout": 0.5, "num_layers": 2}])
def test_layer_in_evaluation_matches_the_cpu(options: dict[str, Any]) -> None:
    module = _seeded(nn.LSTM, INPUT, HIDDEN, **options).eval()
    _assert_same(module, [_random(LENGTH, BATCH, INPUT)], lambda module, x: module(x))


def test_a_sequence_without_a_batch_and_an_empty_batch() -> None:
    module = _seeded(nn.GRU, INPUT, HIDDEN)
    _assert_same(module, [_random(LENGTH, INPUT)], lambda module, x: module(x))
    assert copy.deepcopy(module).to("tpu")(torch.zeros(LENGTH, 0, INPUT).to("tpu"))[0].shape == (LENGTH, 0, 5)


def test_dropout_between_layers_drops() -> None:
    module = _seeded(nn.RNN, INPUT, 100, num_layers=2, dropout=1.0).to("tpu")
    x = _random(LENGTH, BATCH, INPUT).to("tpu")
    output = module(x)[0]
    first = [parameter for name, parameter in module.named_parameters() if name.endswith("l0")]
    assert all(grad.abs().max() == 0 for grad in torch.autograd.grad(output.sum(), first))


def _num_compiled() -> int:
    """By this process: of many only the last ones are listed."""
    return torch.tpu.compile_stats()["compilations"]


@pytest.mark.parametrize("kind", KINDS)
def test_longer_sequences_take_no_more_operations(kind: type[nn.Module]) -> None:
    module = _seeded(kind, INPUT, HIDDEN, num_layers=2).to("tpu")
    counts = []
    for length in 3, 30:
        torch.tpu.synchronize()
        before = _num_compiled()
        module(_random(length, BATCH, INPUT).to("tpu"))[0].sum().backward()
        torch.tpu.synchronize()
        compiled = [each for each in torch.tpu.compilations() if each.number > before]
        counts.append(sum(len(each.operations) for each in compiled))
        module.zero_grad()
    assert 0 < counts[0] < 40
    assert counts[0] == counts[1]


def test_inference_mode_and_no_grad_match_the_cpu() -> None:
    module, x = _seeded(nn.LSTM, INPUT, HIDDEN, bidirectional=True), _random(LENGTH, BATCH, INPUT)
    expected = _tensors(module(x))
    module = module.to("tpu")
    for context in torch.inference_mode, torch.no_grad:
        with context():
            found = [each.cpu() for each in _tensors(module(x.to("tpu")))]
        torch.testing.assert_close(found, [each.detach() for each in expected], rtol=1e-5, atol=1e-5)


def test_autocast_gives_16_bits_near_float32() -> None:
    module, x = _seeded(nn.LSTM, INPUT, HIDDEN), _random(LENGTH, BATCH, INPUT)
    expected = module(x)[0]
    module = module.to("tpu")
    with torch.autocast("tpu"):
        actual = module(x.to("tpu"))[0]
    actual.float().sum().backward()
    assert actual.dtype == torch.bfloat16
    assert module.weight_hh_l0.grad.dtype == torch.float32
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=0.05, atol=0.02)


def test_torch_func_goes_through_the_composite() -> None:
    module, x = _seeded(nn.GRU, INPUT, HIDDEN), _random(LENGTH, BATCH, INPUT)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(module, parameters, (x,))[0].square().sum()

    parameters = {name: each.detach() for name, each in module.named_parameters()}
    expected = torch.func.grad(loss)(parameters, x)
    moved = {name: each.to("tpu") for name, each in parameters.items()}
    module = module.to("tpu")
    for name, grad in torch.func.grad(loss)(moved, x.to("tpu")).items():
        torch.testing.assert_close(grad.cpu(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_of_a_layer_matches_the_cpu(kind: type[nn.Module]) -> None:
    def gradient(module: nn.Module, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([1, 2, 2]), enforce_sorted=False)
        loss = module(x)[0].square().sum() + module(packed)[0].data.square().sum()
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    module = _seeded(kind, INPUT, HIDDEN, bidirectional=True)
    _assert_same(module, [_random(LENGTH, BATCH, INPUT)], gradient)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cell_matches_the_cpu(kind: type[nn.Module]) -> None:
    _assert_same(_seeded(kind, INPUT, HIDDEN), [_random(BATCH, INPUT)], lambda module, x: module(x))


@pytest.mark.parametrize("outputs", [slice(0, 1), slice(1, 2)], ids=["only hy", "only cy"])
def test_lstm_cell_with_a_gradient_for_one_output_only(outputs: slice) -> None:
    module = _seeded(nn.LSTMCell, INPUT, HIDDEN)
    _assert_same(module, [_random(BATCH, INPUT)], lambda module, x: module(x), outputs=outputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_packed_sequence_matches_the_cpu(kind: type[nn.Module], options: dict[str, Any]) -> None:
    is_batch_first = options.get("batch_first", False)

    def packed(module: nn.Module, x: Tensor) -> Any:
        rows = pack_padded_sequence(x, torch.tensor([1, 2, 4]), is_batch_first, enforce_sorted=False)
        output, state = module(rows)
        return pad_packed_sequence(output, is_batch_first)[0], state

    x = _random(4, BATCH, INPUT).transpose(0, int(is_batch_first)).contiguous()
    _assert_same(_seeded(kind, INPUT, HIDDEN, **options), [x], packed)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_packing_by_itself(device: str) -> None:
    x = _random(BATCH, 4, 2, 3).to(device).requires_grad_()
    packed = pack_padded_sequence(x, torch.tensor([3, 2, 2]), batch_first=True)
    assert packed.batch_sizes.tolist() == [3, 3, 1]
    padded, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=-1, total_length=5)
    assert lengths.tolist() == [3, 2, 2]
    is_there = torch.arange(5) < lengths[:, None]
    expected = torch.where(is_there[..., None, None], F.pad(x.cpu(), (0, 0, 0, 0, 0, 1)), -1)
    torch.testing.assert_close(padded.cpu(), expected, rtol=0, atol=0)
    numbers = pack_padded_sequence(torch.ones(2, 2, dtype=torch.int64, device=device), torch.tensor([2, 1]))
    assert pad_packed_sequence(numbers)[0].tolist() == [[1, 1], [1, 0]]
    (padded * 2).sum().backward()
    assert torch.equal(x.grad.cpu(), (2.0 * is_there[:, :4, None, None]).expand(x.shape))
    for lengths, message in (([3, 4, 2], "sorted"), ([3, 2, 0], "greater than 0"), ([3, 2], "length")):
        with pytest.raises(RuntimeError, match=message):
            pack_padded_sequence(x, torch.tensor(lengths), batch_first=True)


def test_packed_sequences_of_as_many_rows_share_a_program() -> None:
    module = _seeded(nn.LSTM, INPUT, HIDDEN, num_layers=2).to("tpu")
    x = _random(BATCH, 5, INPUT).to("tpu")
    before = None
    for lengths in ([5, 3, 1], [5, 2, 2], [5, 3, 1]):
        module(pack_padded_sequence(x, torch.tensor(lengths), batch_first=True))[1][0].sum().backward()
        torch.tpu.synchronize()
        module.zero_grad()
        if before is None:
            before = _num_compiled()
    assert _num_compiled() == before


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_second_derivative_matches_the_cpu(kind: type[nn.Module]) -> None:
    def gradient(module: nn.Module, x: Tensor) -> Tensor:
        loss = sum(output.square().sum() for output in _tensors(module(x)))
        return torch.autograd.grad(loss, x, create_graph=True)[0]

    _assert_same(_seeded(kind, INPUT, HIDDEN), [_random(BATCH, INPUT)], gradient)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_bfloat16_stays_near_float32(kind: type[nn.Module]) -> None:
    module, x = _seeded(kind, INPUT, HIDDEN), _random(LENGTH, BATCH, INPUT)
    expected = module(x)[0]
    actual = module.to("tpu", torch.bfloat16)(x.to("tpu", torch.bfloat16))[0]
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float().cpu(), expected, rtol=0.05, atol=0.02)


def test_gates_that_do_not_fit_the_state_are_one_clear_error() -> None:
    gates, state = torch.zeros(2, 9, device="tpu"), torch.zeros(2, 4, device="tpu")
    with pytest.raises(RuntimeError, match=r"GRU cell: a state of \(2, 4\) needs input gates of \(2, 12\)"):
        torch.ops.aten._thnn_fused_gru_cell(gates, gates, state)
