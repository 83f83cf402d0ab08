"""Dynamo, active around eager operations, does not trace the device's own Python nor JAX."""

import torch
from torch import Tensor


def test_eager_operations_behind_a_graph_break_are_recorded_without_dynamo(monkeypatch):
    from torch._dynamo.convert_frame import ConvertFrameAssert

    seen = []
    convert = ConvertFrameAssert.__call__

    def recorded(self, frame, *args, **kwargs):
        seen.append(frame.f_code.co_filename)
        return convert(self, frame, *args, **kwargs)

    monkeypatch.setattr(ConvertFrameAssert, "__call__", recorded)

    @torch.compiler.disable(recursive=False)  # runs as it is, with Dynamo's hook on what it calls
    def eager(x: Tensor) -> Tensor:
        y = torch.special.i0e(x.mul(3).fliplr())
        z = torch.linalg.det(torch.eye(3, device=x.device) + x[:, :3])
        return y[y > 0.2].sum() + torch.repeat_interleave(y, 2).sum() + z

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    results = [
        torch.compile(lambda x: eager(x + 1), backend="eager")(each).item() for each in (x, x.to("tpu"))
    ]
    torch._dynamo.reset()
    torch.testing.assert_close(*map(torch.tensor, results))
    assert __file__ in seen
    assert not [name for name in seen if "tpu_backend" in name or "/jax/" in name]
