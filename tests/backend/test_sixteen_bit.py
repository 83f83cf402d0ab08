"""In 16 bit, what PyTorch's CPU kernels round on their way is rounded here too.

Bit for bit, but for a few elements: XLA may fuse a product with a sum. Rounding once, at the end, would
change more of them by far.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

_MOST_THAT_DIFFER = 0.01


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1]))


def _uniform(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(7))


_FORWARD: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "addr": (
        lambda a, b, c: torch.addr(a, b, c, beta=0.6, alpha=0.2),
        [_normal(40, 50), _normal(40), _normal(50)],
    ),
    "pow 3": (lambda a: a**3, [_normal(2000)]),
    "logit": (torch.logit, [_uniform(2000)]),
    "log_softmax": (lambda a: F.log_softmax(a, -1), [_normal(100, 9)]),
    "linspace": (lambda a: torch.linspace(4.3, -3, 500, dtype=a.dtype, device=a.device), [_normal(1)]),
    "mse_loss": (lambda a, b: F.mse_loss(a, b, reduction="none"), [_normal(40, 50), _normal(40, 50)]),
    "binary_cross_entropy_with_logits": (
        lambda a, b, c: F.binary_cross_entropy_with_logits(a, b, pos_weight=c, reduction="none"),
        [_normal(40, 50), _uniform(40, 50), _uniform(50)],
    ),
    "interpolate linear": (lambda a: F.interpolate(a, 37, mode="linear"), [_normal(4, 8, 20)]),
    "interpolate bicubic": (lambda a: F.interpolate(a, (17, 9), mode="bicubic"), [_normal(2, 4, 8, 6)]),
    "add": (lambda a, b: torch.add(a, b, alpha=0.3), [_normal(40, 50), _normal(40, 50)]),
    "a number added": (lambda a: a + 0.3, [_normal(2048)]),
    "a number subtracted from": (lambda a: 0.3 - a, [_normal(2048)]),
    "the remainder of a number": (lambda a: a % 0.3, [_normal(2048)]),
    "fmod of a number": (lambda a: torch.fmod(a, 0.3), [_normal(2048)]),
    "the power of a number": (lambda a: a**0.3, [_uniform(2048)]),
    "a power of a number": (lambda a: 0.3**a, [_normal(2048)]),
    "compared with a number": (lambda a: a.mul(0).add(0.3) == 0.3, [_normal(2048)]),
    "hardshrink": (lambda a: F.hardshrink(a.mul(0).add(0.3), 0.3), [_normal(2048)]),
    "smooth_l1_loss": (
        lambda a, b: F.smooth_l1_loss(a, b, reduction="none", beta=0.3),
        [_normal(64, 64), _normal(64, 64) / 2],
    ),
    "polygamma": (lambda a: torch.polygamma(3, a), [_uniform(2000) + 0.5]),
    "prod": (lambda a: a.prod(0), [_uniform(9, 512) + 0.5]),
    "logsumexp": (lambda a: torch.logsumexp(a, 0), [_normal(40, 512)]),
    "soft_margin_loss": (
        lambda a, b: F.soft_margin_loss(a, b, reduction="none"),
        [_normal(40, 50) * 9, _normal(40, 50)],
    ),
    "batch_norm": (
        lambda a, b, c: F.batch_norm(a, None, None, b, c, training=True),
        [_normal(9, 8, 6, 7), _normal(8), _uniform(8)],
    ),
    "batch_norm without planes": (lambda a: F.batch_norm(a, None, None, training=True), [_normal(70, 60)]),
    "instance_norm": (F.instance_norm, [_normal(9, 8, 6, 7)]),
    "fold": (lambda a: F.fold(a, (9, 9), 3), [_normal(4, 27, 49)]),
    "index_reduce": (
        lambda a, b: a.index_reduce(0, torch.arange(40, device=a.device) % 4, b, "mean"),
        [_normal(4, 500), _normal(40, 500)],
    ),
    "segment_reduce": (
        lambda a: torch.segment_reduce(
            a, "mean", lengths=torch.tensor([3, 11, 6], device=a.device), initial=1.0
        ),
        [_normal(20, 500)],
    ),
    "huber_loss": (lambda a, b: F.huber_loss(a, b, "none", 0.7), [_normal(40, 50), _normal(40, 50)]),
}

_BACKWARD: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "avg_pool2d": (lambda a: F.avg_pool2d(a, 3, 2, 1, ceil_mode=True), [_normal(2, 4, 14, 14)]),
    "adaptive_avg_pool2d": (lambda a: F.adaptive_avg_pool2d(a, (5, 7)), [_normal(2, 8, 8, 9)]),
    "max_pool2d": (lambda a: F.max_pool2d(a, 5, 1, 2), [_normal(2, 4, 14, 14)]),
    "pad reflect": (lambda a: F.pad(a, (3, 2, 1, 3), mode="reflect"), [_normal(2, 4, 6, 6)]),
    "pad replicate": (lambda a: F.pad(a, (3, 2, -1, 3), mode="replicate"), [_normal(2, 4, 6, 6)]),
    "unfold": (lambda a: F.unfold(a, 3, dilation=2, padding=2, stride=1), [_normal(2, 4, 9, 9)]),
    "Tensor.unfold": (lambda a: a.unfold(1, 8, 3), [_normal(40, 50)]),
    "binary_cross_entropy": (F.binary_cross_entropy, [_uniform(40, 50), _uniform(40, 50)]),
    "soft_margin_loss": (F.soft_margin_loss, [_normal(40, 50), _normal(40, 50)]),
    "segment_reduce prod": (
        lambda a: torch.segment_reduce(a, "prod", lengths=torch.tensor([3, 11, 6], device=a.device)),
        [_uniform(20, 500) + 0.5],
    ),
    "layer_norm": (lambda a, b: F.layer_norm(a, (50,), b), [_normal(40, 50), _uniform(50)]),
    "glu": (F.glu, [_normal(40, 50)]),
    "mse_loss": (F.mse_loss, [_normal(40, 50), _normal(40, 50)]),
    "huber_loss": (F.huber_loss, [_normal(40, 50), _normal(40, 50)]),
    "huber_loss of odd size": (lambda a, b: F.huber_loss(a, b, delta=1.7), [_normal(5), _normal(5)]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _FORWARD)
def test_results_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function, operands = _FORWARD[name]
    _assert_same(*(function(*(each.to(device, dtype) for each in operands)) for device in ("tpu", "cpu")))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", _BACKWARD)
def test_gradients_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    function, operands = _BACKWARD[name]

    def gradient(device: str) -> torch.Tensor:
        first, *others = (each.to(device, dtype) for each in operands)
        result = function(first.requires_grad_(), *others)
        return torch.autograd.grad(result, first, _normal(*result.shape, 3)[..., 0].to(device, dtype))[0]

    _assert_same(gradient("tpu"), gradient("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_of_what_is_rounded_before_them(dtype: torch.dtype) -> None:
    def sums(device: str) -> torch.Tensor:
        return (_normal(20, 30, 40).to(device, dtype) * _normal(20, 30, 1).to(device, dtype)).sum((0, 2))

    _assert_same(sums("tpu"), sums("cpu"))


def _statistics(device: str, input_dtype: torch.dtype, parameter_dtype: torch.dtype) -> list[torch.Tensor]:
    planes, scale = _normal(6, 5, 7).to(device, input_dtype), _uniform(5).to(device, parameter_dtype)
    mean, variance = torch.zeros_like(scale), torch.ones_like(scale)
    by_batch = torch.native_batch_norm(planes, scale, scale, mean, variance, True, 0.1, 1e-5)
    by_layer = torch.native_layer_norm(planes.mT, (5,), scale, scale, 1e-5)
    return [*by_batch[1:], *by_layer[1:], mean, variance]


@pytest.mark.parametrize("parameter_dtype", [None, torch.float32], ids=["the same", "float32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_kept_in_the_dtype_of_the_parameters(
    dtype: torch.dtype, parameter_dtype: torch.dtype | None
) -> None:
    ours, theirs = (_statistics(device, dtype, parameter_dtype or dtype) for device in ("tpu", "cpu"))
    for actual, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(actual.cpu(), expected)


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype
    differing = (ours.cpu() != theirs).float().mean().item()
    assert differing <= _MOST_THAT_DIFFER, f"{differing:.1%} of the elements differ"
