"""Printing a tpu tensor: what the CPU prints, one host read, nothing compiled."""

import pytest
import torch

TENSORS = {
    "scalar": torch.tensor(3.5),
    "vector": torch.tensor([1.0, 2.5, -3.0]),
    "matrix": torch.arange(12.0).reshape(3, 4) / 7,
    "cube": torch.arange(24).reshape(2, 3, 4),
    "large": torch.arange(5000.0).reshape(50, 100),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
    "bfloat16": torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
    "float64": torch.tensor([1 / 3], dtype=torch.float64),
    "not finite": torch.tensor([float("nan"), float("inf"), 1.0]),
    "view": torch.arange(12.0).reshape(3, 4).t()[1:],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_prints_as_on_the_cpu_with_one_read_and_nothing_compiled(name):
    host = TENSORS[name]
    device = host.to("tpu")
    before = torch.tpu.compile_stats()
    text = repr(device)
    after = torch.tpu.compile_stats()
    assert after["compilations"] == before["compilations"]
    assert after["ops_recorded"] == before["ops_recorded"]
    assert after["host_reads"] - before["host_reads"] == (1 if host.numel() else 0)
    assert "device='tpu:0'" in text
    assert _without_device(text) == _without_device(repr(host))


def _without_device(text: str) -> str:
    return "".join(text.replace("device='tpu:0'", "").replace(",", " ").split())


def test_what_prints_is_the_value_at_that_moment():
    tensor = torch.ones(2, device="tpu")
    tensor += 1
    assert str(tensor) == "tensor([2., 2.], device='tpu:0')"
    assert f"{tensor[0]}" == "2.0" or "2." in f"{tensor[0]}"
    assert f"{tensor.sum():.2f}" == "4.00"


def test_parameters_and_tensors_with_gradients_print():
    parameter = torch.nn.Parameter(torch.ones(2, device="tpu"))
    assert "requires_grad=True" in repr(parameter)
    assert "grad_fn=<MulBackward0>" in repr(parameter * 2)
    assert "Parameter containing" in repr(parameter)


def test_a_module_and_a_storage_print():
    assert "Linear(in_features=2, out_features=1" in repr(torch.nn.Linear(2, 1).to("tpu"))
    assert "device=tpu:0" in repr(torch.ones(1, device="tpu").untyped_storage())


def test_cpu_tensors_print_as_ever():
    assert repr(torch.tensor([1.0, 2.0])) == "tensor([1., 2.])"
