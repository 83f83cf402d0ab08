"""The summary of a signature, which the recorder gives undecoded, against the signature decoded."""

import math

import pytest
import torch
import torch.nn.functional as F

from tpu_backend import _C
from tpu_backend.runtime import signature as signatures
from tpu_backend.runtime.signature import RuntimeArg


def written_in_place(x):
    x[1:3].add_(2.5)


def on_lists(x):
    torch._foreach_add_([x, x.clone()], 2)
    torch._foreach_mul([x, x.clone()], [2.0, 3.0])


CALLS = {
    "a view": lambda x: x[1:, 2] + x.t()[0, 1:],
    "written through a view": written_in_place,
    "lists": on_lists,
    "numbers": lambda x: torch.addcmul(x, x, x, value=3) * 2.5 + torch.arange(6, device=x.device) * 2,
    "of 64 bit": lambda x: x.double() * 0.5,
    "drawn": lambda x: torch.randn_like(x).normal_(1.0, 2.0).sum() + x.softmax(1).multinomial(2).sum(),
    "a string": lambda x: F.gelu(x, approximate="tanh"),
    "several results": lambda x: x.topk(2).values + x.max(1, keepdim=True).indices,
    "nothing": lambda x: x[:0].sin().sum() + torch.cat([x, x[:0]]).sum(),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(6, 4, device=x.device).t()),
    "grown": lambda x: x.clone().resize_(30).sum(),
    "of 16 bit": lambda x: (x.bfloat16() @ x.t().bfloat16()).half(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_summary_says_what_the_signature_says(name):
    x = torch.rand(4, 6).to("tpu")
    torch.tpu.flush()
    kept = CALLS[name](x)
    numbers = set(_C.recent_entries(_C.current_device())[0])
    assert numbers
    for number in numbers:
        summary, signature = signatures.summary(number), signatures.signature(number)
        leaves = [leaf for _, leaf in signature.named_leaves()]
        numbers = [leaf.is_integer for leaf in leaves if isinstance(leaf, RuntimeArg)]
        real = numbers.count(False)
        made = [output for output in signature.outputs if not output.skip]
        assert summary.num_links == len([leaf for leaf in signature.tensors() if leaf.reads]) + len(
            [output for output in made if output.partial]
        )
        assert summary.num_numbers == (
            0 if signature.wide else real,
            real if signature.wide else 0,
            numbers.count(True) + 2 * signature.random,
            len([leaf for leaf in signature.tensors() if leaf.has_offset]),
        )
        assert summary.layouts == [(output.layout_dtype, output.layout_dims) for output in made]
        assert summary.values == [
            (output.dtype, math.prod(output.layout_dims))
            for output in signature.outputs
            if not output.undefined
        ]
    del kept


def test_equal_outlines_are_those_of_other_sizes():
    def form(function):
        kept = function()
        summary = signatures.summary(_C.recent_entries(_C.current_device())[0][-1])
        del kept
        return summary

    x = torch.rand(4, 6).to("tpu")
    shorter = x[:3].clone()
    some = form(lambda: x.sum(0))
    assert some.outline == form(lambda: shorter.sum(1)).outline
    assert some.digest != form(lambda: shorter.sum(0)).digest
    assert some.digest != form(lambda: x.sum(1)).digest
    assert some.outline != form(lambda: x.sum((0, 1))).outline
    assert some.outline != form(lambda: x.amax(0)).outline
