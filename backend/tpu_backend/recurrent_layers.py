"""`nn.LSTM`, `nn.GRU` and `nn.RNN`: one direction of a layer is one operation over all of a sequence.

PyTorch's composite takes a few operations a time step: a program would be as long as the sequence, and each
row of lengths in a packed sequence would have its own. It is left what the operation lacks: projections,
derivatives of torch.func, and whoever looks at each operation (a mode of Python, DTensor).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.library import Library
from torch.nn import functional as F

from tpu_backend.untraced import untraced

_NUM_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_NUM_KEPT = {
    "lstm": 4,
    "gru": 5,
    "rnn_tanh": 0,
    "rnn_relu": 0,
}  # values a hidden unit and step, for the gradient

# For T steps of a batch of B, with H hidden units and G gates: gates (T, B, G * H) are the inputs times their
# weights, with their bias; hx and cx are (B, H), the weight (G * H, H), the bias (G * H). `is_there` (T, B),
# bool, says which steps a sequence has. The results are the states after each step (T, B, H), the last ones,
# and what the gradient needs. What an LSTM alone has is (0,) for the others.
_SCHEMAS = {
    "recurrent_layer": "(Tensor gates, Tensor hx, Tensor? cx, Tensor weight, Tensor? bias, Tensor? is_there, "
    "str cell, bool reverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "recurrent_layer_backward": "(Tensor grad, Tensor grad_hy, Tensor grad_cy, Tensor hx, Tensor? cx, "
    "Tensor weight, Tensor? is_there, Tensor output, Tensor cells, Tensor kept, str cell, bool reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
}
_PLAIN = (Tensor, nn.Parameter)


@cache
def register() -> tuple[Library, Library]:
    """Define the operators and have layers made of them, for the life of the process. Idempotent."""
    ours, aten = Library("tpu", "FRAGMENT"), Library("aten", "IMPL")
    for name, infer in (("recurrent_layer", _infer), ("recurrent_layer_backward", _infer_backward)):
        ours.define(name + _SCHEMAS[name])
        ours.impl(name, untraced(infer), "Meta")
    kernels = {f"{cell}.input": _sequences(cell) for cell in _NUM_GATES}
    kernels |= {f"{cell}.data": _packed_sequences(cell) for cell in _NUM_GATES}
    kernels |= {"_pack_padded_sequence": untraced(_pack), "_pad_packed_sequence": untraced(_pad)}
    for overload, kernel in kernels.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):  # the second in inference mode
            aten.impl(overload, kernel, key)
    return ours, aten


class _Layers(NamedTuple):
    """The layers of a call, as `nn.RNNBase` gives them to PyTorch."""

    cell: str
    states: Sequence[Tensor]  # hx, and of an LSTM cx: (layers * directions, B, H)
    parameters: Sequence[Tensor]
    has_biases: bool
    num_layers: int
    dropout: float
    is_training: bool
    num_directions: int

    def are_operations(self, *inputs: Tensor) -> bool:
        """Whether the operation does what PyTorch's composite would; that one refuses what does not fit."""
        tensors = [*inputs, *self.states, *self.parameters]
        if (
            not all(type(each) in _PLAIN and each.device.type == "tpu" for each in tensors)
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.peek_interpreter_stack() is not None
            or forward_ad._current_level >= 0
        ):
            return False
        dtypes = {each.dtype for each in tensors}
        if not all(dtype.is_floating_point for dtype in dtypes):
            return False
        is_one_dtype = len(dtypes) == 1 or (torch.is_autocast_enabled("tpu") and torch.float64 not in dtypes)
        num_states = 2 if self.cell == "lstm" else 1
        num_runs = self.num_layers * self.num_directions
        return (
            is_one_dtype
            and len(self.states) == num_states
            and len(self.parameters) == num_runs * self._stride
            and all(state.dim() == 3 and state.shape == self.states[0].shape for state in self.states)
            and self.states[0].shape[0] == num_runs
            and all(each.numel() > 0 for each in tensors)
        )

    def run(
        self, inputs: Tensor, packing: _Packing | None = None, batch_first: bool = False
    ) -> tuple[Tensor, ...]:
        """The last layer's outputs, (T, B, ...) or packed like the inputs, and the last states of all."""
        tensors = [inputs, *self.states, *self.parameters]
        if torch.is_autocast_enabled("tpu"):
            tensors = [each.to(torch.get_autocast_dtype("tpu")) for each in tensors]
        inputs, states = tensors[0], tensors[1 : 1 + len(self.states)]
        parameters = tensors[1 + len(self.states) :]
        last: list[Sequence[Tensor]] = []
        for layer in range(self.num_layers):
            outputs = []
            for is_reverse in (False, True)[: self.num_directions]:
                run = len(last)
                of_input, weight, *biases = parameters[run * self._stride :][: self._stride]
                of_input_bias, bias = biases or (None, None)
                gates = F.linear(inputs, of_input, of_input_bias)
                hx, cx = (each[run] for each in states) if self.cell == "lstm" else (states[0][run], None)
                if packing is not None:
                    gates = packing.to_steps(gates)
                elif batch_first and layer == 0:
                    gates = gates.transpose(0, 1)
                is_there = None if packing is None else packing.is_there
                output, *ends = _Layer.apply(gates, hx, cx, weight, bias, is_there, self.cell, is_reverse)
                outputs.append(output if packing is None else packing.to_rows(output))
                last.append(ends[: len(states)])
            inputs = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
            if self.dropout and self.is_training and layer < self.num_layers - 1:
                inputs = F.dropout(inputs, self.dropout)
        return inputs, *(torch.stack(each) for each in zip(*last, strict=True))

    @property
    def _stride(self) -> int:
        """Parameters a layer and direction; a projection is one more."""
        return 4 if self.has_biases else 2


class _Packing:
    """Where the rows of a packed sequence belong, see `nn.utils.rnn.PackedSequence`."""

    def __init__(self, batch_sizes: Tensor, device: torch.device):
        column = torch.arange(int(batch_sizes[0]))
        is_there = column < batch_sizes[:, None]
        first = (batch_sizes.cumsum(0) - batch_sizes)[:, None]
        self._shape = is_there.shape
        self._row_of_step = torch.where(is_there, first + column, 0).flatten().to(device)
        self._step_of_row = is_there.flatten().nonzero().flatten().to(device)
        self.is_there = is_there.to(device)
        """Which steps each sequence has: (T, B)."""

    def to_steps(self, rows: Tensor) -> Tensor:
        """(N, ...) as (T, B, ...); what is not there is some row."""
        return rows.index_select(0, self._row_of_step).unflatten(0, self._shape)

    def to_rows(self, steps: Tensor) -> Tensor:
        """(T, B, ...) as (N, ...)."""
        return steps.flatten(0, 1).index_select(0, self._step_of_row)


def _pack(input: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """`nn.utils.rnn.pack_padded_sequence`. Lengths are data of its program, not part of it."""
    # The CPU's kernel knows which lengths are wrong.
    _, batch_sizes = torch._pack_padded_sequence(torch.empty(input.shape[:2]), lengths, batch_first)
    steps = input.transpose(0, 1) if batch_first else input
    return _Packing(batch_sizes, input.device).to_rows(steps[: len(batch_sizes)]), batch_sizes


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """`nn.utils.rnn.pad_packed_sequence`."""
    form, lengths = torch._pad_packed_sequence(
        torch.empty(data.shape[:1]), batch_sizes, False, padding_value, total_length
    )
    packing = _Packing(batch_sizes, data.device)
    is_missing = packing.is_there.logical_not()[(...,) + (None,) * (data.dim() - 1)]
    steps = packing.to_steps(data).masked_fill(is_missing, padding_value)
    missing = len(form) - len(steps)
    if missing:
        steps = torch.cat([steps, steps.new_full((missing, *steps.shape[1:]), padding_value)])
    return steps.transpose(0, 1) if batch_first else steps, lengths


def _composite(cell: str, overload: str) -> Callable[..., tuple[Tensor, ...]]:
    """PyTorch's own layers, of many operations."""
    operator = getattr(getattr(torch.ops.aten, cell), overload)
    found: Callable[..., tuple[Tensor, ...]] = operator._op_dk
    return lambda *arguments: found(torch._C.DispatchKey.CompositeImplicitAutograd, *arguments)


def _layers_of(
    cell: str,
    states: Tensor | Sequence[Tensor],
    parameters: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    is_training: bool,
    is_bidirectional: bool,
) -> _Layers:
    """From what PyTorch's operators are given beside the sequences."""
    listed = [states] if isinstance(states, Tensor) else states
    return _Layers(
        cell, listed, parameters, has_biases, num_layers, dropout, is_training, 1 + is_bidirectional
    )


def _sequences(cell: str) -> Callable[..., tuple[Tensor, ...]]:
    composite = _composite(cell, "input")

    def kernel(input: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *of_layers, batch_first = given
        layers = _layers_of(cell, *of_layers)
        if input.dim() != 3 or not layers.are_operations(input):
            return composite(input, *given)
        output, *states = layers.run(input, batch_first=batch_first)
        return output.transpose(0, 1) if batch_first else output, *states

    return untraced(kernel)


def _packed_sequences(cell: str) -> Callable[..., tuple[Tensor, ...]]:
    composite = _composite(cell, "data")

    def kernel(data: Tensor, batch_sizes: Tensor, *of_layers: Any) -> tuple[Tensor, ...]:
        layers = _layers_of(cell, *of_layers)
        if data.dim() != 2 or batch_sizes.device.type != "cpu" or not layers.are_operations(data):
            return composite(data, batch_sizes, *of_layers)
        return layers.run(data, _Packing(batch_sizes, data.device))

    return untraced(kernel)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gates: Tensor,
        hx: Tensor,
        cx: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        is_there: Tensor | None,
        cell: str,
        reverse: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        output, hy, cy, cells, kept = torch.ops.tpu.recurrent_layer(
            gates, hx, cx, weight, bias, is_there, cell, reverse
        )
        ctx.cell, ctx.reverse = cell, reverse
        ctx.save_for_backward(gates, hx, cx, weight, bias, is_there, output, cells, kept)
        return output, hy, cy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gates, hx, cx, weight, bias, is_there, output, cells, kept = ctx.saved_tensors
        given = gates, hx, cx, weight, bias
        if torch.is_grad_enabled():  # somebody may differentiate the gradients
            return *_differentiable(given, is_there, ctx.cell, ctx.reverse, grads), None, None, None
        found = torch.ops.tpu.recurrent_layer_backward(
            *grads, hx, cx, weight, is_there, output, cells, kept, ctx.cell, ctx.reverse
        )
        wanted = (grad if each is not None else None for grad, each in zip(found, given, strict=True))
        return *wanted, None, None, None


def _differentiable(
    given: Sequence[Tensor | None],
    is_there: Tensor | None,
    cell: str,
    reverse: bool,
    grads: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients, made of operations that have their own: a few a time step."""
    gates, h, c, weight, bias = given
    assert gates is not None
    assert h is not None
    assert weight is not None
    outputs: dict[int, Tensor] = {}
    for step in reversed(range(len(gates))) if reverse else range(len(gates)):
        of_hidden = F.linear(h, weight, bias)
        if cell == "lstm":
            assert c is not None
            next_h, next_c = _lstm_cell(gates[step] + of_hidden, c)
        elif cell == "gru":
            next_h, next_c = _gru_cell(gates[step], of_hidden, h), None
        else:
            sums = gates[step] + of_hidden
            next_h, next_c = sums.tanh() if cell == "rnn_tanh" else sums.relu(), None
        if is_there is not None:
            is_here = is_there[step][:, None]
            next_h = torch.where(is_here, next_h, h)
            next_c = torch.where(is_here, next_c, c) if next_c is not None and c is not None else None
        outputs[step] = h = next_h
        c = next_c
    results = [torch.stack([outputs[step] for step in range(len(gates))]), h]
    results += [] if c is None else [c]
    sources = [each for each in given if each is not None and each.requires_grad]
    found = iter(torch.autograd.grad(results, sources, grads[: len(results)], create_graph=True))
    return [next(found) if each is not None and each.requires_grad else None for each in given]


def _lstm_cell(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru_cell(of_input: Tensor, of_hidden: Tensor, h: Tensor) -> Tensor:
    input_r, input_z, input_n = of_input.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = of_hidden.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (h - n)


def _infer(
    gates: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    is_there: Tensor | None,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    (steps, batch, num_gates), hidden = gates.shape, hx.shape[-1]
    expected = (batch, hidden), _NUM_GATES[cell] * hidden, (num_gates, hidden)
    if (tuple(hx.shape), num_gates, tuple(weight.shape)) != expected:
        raise RuntimeError(
            f"{cell} of {tuple(gates.shape)} gates and a state of {tuple(hx.shape)}: expected a state of "
            f"(batch, hidden), {_NUM_GATES[cell]} * hidden gates and weights of (gates, hidden), "
            f"got weights of {tuple(weight.shape)}"
        )
    output, is_lstm = gates.new_empty((steps, batch, hidden)), cell == "lstm"
    return (
        output,
        gates.new_empty((batch, hidden)),
        gates.new_empty((batch, hidden) if is_lstm else (0,)),
        gates.new_empty(output.shape if is_lstm else (0,)),
        gates.new_empty((steps, batch, _NUM_KEPT[cell] * hidden) if _NUM_KEPT[cell] else (0,)),
    )


def _infer_backward(
    grad: Tensor,
    grad_hy: Tensor,
    grad_cy: Tensor,
    hx: Tensor,
    cx: Tensor | None,
    weight: Tensor,
    is_there: Tensor | None,
    output: Tensor,
    cells: Tensor,
    kept: Tensor,
    cell: str,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """The gradients of gates, hx, cx, weight and bias."""
    num_gates = weight.shape[0]
    return (
        grad.new_empty((*grad.shape[:2], num_gates)),
        hx.new_empty(hx.shape),
        hx.new_empty((0,) if cx is None else cx.shape),
        weight.new_empty(weight.shape),
        weight.new_empty((num_gates,)),
    )
