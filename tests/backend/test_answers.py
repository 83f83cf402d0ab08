"""Operators whose forms are not traced when they are recorded: what tracing would have said."""

from collections import defaultdict
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.utils._pytree import tree_leaves, tree_map

from tpu_backend.lowering import TABLE, NotLoweredError
from tpu_backend.lowering.answers import ALWAYS
from tpu_backend.runtime.segment import _is_refused, num_offsets, trace_entry
from tpu_backend.runtime.signature import Signature, signature

_SAMPLES = 8
_DTYPES = torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64
_OPERATORS = """
    _foreach_add _foreach_div _foreach_mul _foreach_norm _foreach_sqrt abs add addcdiv
    addcmul amax amin cat clamp cos div eq erf exp expm1 fill ge gt le linalg.vector_norm log log1p
    log_softmax logical_and logical_not lt masked_fill maximum mean minimum mul ne neg
    nn.functional.dropout nn.functional.embedding nn.functional.gelu nn.functional.layer_norm
    nn.functional.linear nn.functional.mse_loss nn.functional.nll_loss nn.functional.relu
    nn.functional.silu reciprocal rsqrt sigmoid sin softmax sqrt stack sub sum tanh to where zero_
    zeros_like
"""
_OF_MANY_RANKS = {name for name in ALWAYS if name.startswith("tpu_collective::")}


def _on_device(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().to("tpu").requires_grad_(leaf.requires_grad)


def _record(operator, dtype: torch.dtype) -> None:
    """Samples of an operator and their gradients. Nothing is read, and little computed."""
    has_gradients = operator in op_db and operator.supports_autograd and dtype.is_floating_point
    for sample, _ in zip(operator.sample_inputs("cpu", dtype, requires_grad=has_gradients), range(_SAMPLES)):
        arguments, named = tree_map(_on_device, ((sample.input, *sample.args), sample.kwargs))
        results = [
            each
            for each in tree_leaves(operator(*arguments, **named))
            if isinstance(each, torch.Tensor) and each.requires_grad
        ]
        torch.autograd.backward(results, [torch.ones_like(each) for each in results])


def _record_what_the_database_has_not() -> None:
    for dtype in torch.float32, torch.bfloat16:
        x = torch.randn(2, 3, 5, 4, dtype=dtype).to("tpu").requires_grad_()
        mask = torch.ones(5, 5, dtype=torch.bool, device="tpu")
        for options in {}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 2.0}:
            F.scaled_dot_product_attention(x, x, x, **options).sum().backward()
        x.clamp(0, 1)
        x.clamp(min=0.5)
        for compare in torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge:
            compare(x, 0.5)
        F.cross_entropy(x.reshape(30, 4), torch.zeros(30, dtype=torch.int64, device="tpu")).backward()


def _is_traced_or_never_run(form: Signature) -> bool:
    """Empty tensors are traced. Never run: lists on two devices, which PyTorch takes one by one, and a tensor
    for the result that gets another size first.
    """
    is_empty = any(0 in tensor.sizes for tensor in form.tensors())
    made = [output for output in form.outputs if output.computed is not None]
    return is_empty or not form.outputs or any(output.computed.shape != output.sizes for output in made)


def _forms() -> dict[str, list[Signature]]:
    """Those that this process has recorded, by operator, and has not traced."""
    found: dict[str, list[Signature]] = defaultdict(list)
    for number in count():
        try:
            form = signature(number)
        except IndexError:
            break
        if form.name in ALWAYS and not _is_refused(form) and not _is_traced_or_never_run(form):
            found[form.name].append(form)
    return found


def test_what_is_not_traced_has_a_lowering():
    assert set(ALWAYS) <= set(TABLE)


def test_tracing_says_the_same_of_every_form():
    databases = [*op_db, *foreach_binary_op_db, *foreach_reduce_op_db, *foreach_unary_op_db]
    for operator in databases:
        if operator.name in _OPERATORS.split():
            for dtype in set(_DTYPES) & operator.supported_dtypes("cpu"):
                _record(operator, dtype)
    _record_what_the_database_has_not()
    forms = _forms()
    assert set(forms) | _OF_MANY_RANKS == set(ALWAYS)
    for name, of_operator in forms.items():
        for form in of_operator:
            try:
                traced = trace_entry(form, [(0, False)] * num_offsets(form))
            except NotLoweredError as error:
                pytest.fail(f"{form.described()}: {error}")
            assert bool(traced.bounds_checks) == ALWAYS[name].has_bounds_checks
            assert ALWAYS[name].reads_precision or not traced.reads_precision


def test_a_class_of_one_element_for_one_sample():
    """PyTorch's samples have none."""
    logits, label = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1])
    for weight in None, torch.tensor([1.0, 3.0, 2.0]):
        expected = F.cross_entropy(logits, label, weight)
        found = F.cross_entropy(
            logits.to("tpu"), label.to("tpu"), None if weight is None else weight.to("tpu")
        )
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize(
    ("name", "call"),
    {
        "add": lambda on: torch.ones(2, 3, device=on) + torch.ones(4, device=on),
        "cat": lambda on: torch.cat([torch.ones(2, 3, device=on), torch.ones(2, device=on)]),
        "stack": lambda on: torch.stack([torch.ones(2, device=on), torch.ones(3, device=on)]),
        "linear": lambda on: F.linear(torch.ones(2, 3, device=on), torch.ones(4, 5, device=on)),
        "embedding": lambda on: F.embedding(torch.ones(2, device=on), torch.ones(4, 5, device=on)),
        "embedding of a vector": lambda on: F.embedding(
            torch.ones(2, device=on, dtype=torch.int64), torch.ones(4, device=on)
        ),
        "loss": lambda on: F.nll_loss(
            torch.ones(2, 3, device=on), torch.ones(3, device=on, dtype=torch.int64)
        ),
        "loss of weights": lambda on: F.nll_loss(
            torch.ones(2, 3, device=on),
            torch.ones(2, device=on, dtype=torch.int64),
            torch.ones(4, device=on),
        ),
        "loss of numbers": lambda on: F.nll_loss(torch.ones(2, 3, device=on), torch.ones(2, device=on)),
        "mean": lambda on: torch.ones(2, device=on, dtype=torch.int64).mean(0),
        "log_softmax": lambda on: torch.ones(2, device=on, dtype=torch.int64).log_softmax(0),
        "vector_norm": lambda on: torch.linalg.vector_norm(torch.ones(0, device=on), float("inf")),
        "clamp": lambda on: torch.ones(2, device=on, dtype=torch.complex64).clamp(0, 1),
        "norm of nothing": lambda on: torch._foreach_norm([torch.ones(0, device=on)], float("-inf")),
        "foreach": lambda on: torch._foreach_mul([torch.ones(2, device=on)], torch.ones(2, device=on)),
    }.items(),
)
def test_wrong_arguments_are_refused_at_the_call(name, call):
    """Not where the program is compiled: no lowering is asked before that."""
    messages = []
    for place in "cpu", "tpu":
        with pytest.raises((RuntimeError, NotImplementedError, IndexError, ValueError)) as caught:
            call(place)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
