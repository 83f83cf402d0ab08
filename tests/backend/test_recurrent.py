"""Recurrent layers and cells on the device against the CPU: outputs, states and every gradient."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_matches_the_cpu(kind: type[nn.Module], options: dict[str, Any]) -> None:
    shape = (BATCH, LENGTH, INPUT) if options.get("batch_first") else (LENGTH, BATCH, INPUT)
    num_states = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1)
    module = _seeded(kind, INPUT, HIDDEN, **options)
    _assert_same(module, [_random(*shape), *_states(kind, num_states)], _layer)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_cell_matches_the_cpu(kind: type[nn.Module]) -> None:
    _assert_same(_seeded(kind, INPUT, HIDDEN), [_random(BATCH, INPUT)], lambda module, x: module(x))


@pytest.mark.parametrize("outputs", [slice(0, 1), slice(1, 2)], ids=["only hy", "only cy"])
def test_lstm_cell_with_a_gradient_for_one_output_only(outputs: slice) -> None:
    module = _seeded(nn.LSTMCell, INPUT, HIDDEN)
    _assert_same(module, [_random(BATCH, INPUT)], lambda module, x: module(x), outputs=outputs)


def test_packed_sequence_matches_the_cpu() -> None:
    def packed(module: nn.Module, x: Tensor) -> Any:
        output, state = module(pack_padded_sequence(x, torch.tensor([1, 2, 2]), enforce_sorted=False))
        return pad_packed_sequence(output)[0], state

    _assert_same(_seeded(nn.LSTM, INPUT, HIDDEN), [_random(LENGTH, BATCH, INPUT)], packed)


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
