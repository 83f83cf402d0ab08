"""`torch.profiler` sees the device's operators by their names, forward and backward."""

import torch
from torch.profiler import profile, record_function


def test_operators_are_named():
    weight = torch.randn(3, 3).to("tpu").requires_grad_()
    x = torch.randn(2, 3).to("tpu")
    with profile(record_shapes=True) as profiled:
        with record_function("my part"):
            (x @ weight).relu().sum().backward()
        torch.tpu.synchronize()
    named = {event.key: event for event in profiled.key_averages(group_by_input_shape=True)}
    assert {"my part", "aten::mm", "aten::relu", "aten::sum", "aten::threshold_backward"} <= named.keys()
    assert [[2, 3], [3, 3]] in [event.input_shapes for event in profiled.events() if event.name == "aten::mm"]


def test_a_trace_is_written(tmp_path):
    with profile() as profiled:
        torch.ones(2, device="tpu").exp().cpu()
    profiled.export_chrome_trace(str(tmp_path / "trace.json"))
    assert "aten::exp" in (tmp_path / "trace.json").read_text()
