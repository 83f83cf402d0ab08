"""Sums and products of a few numbers on the CPU: those of PyTorch's CPU kernels to the bit."""

import pytest
import torch

from tpu_backend.lowering import few_numbers

NEEDS_VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="PyTorch adds in another order on a CPU without AVX2",
)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]), dtype=dtype)


@NEEDS_VECTORS
@DTYPES
@pytest.mark.parametrize("size", [3, 4, 7, 8, 9, 27, 32, 33, 63, 100, few_numbers._MOST_ADDED])
def test_a_row_is_added_in_the_order_of_the_cpu(size, dtype):
    rows = numbers(20, size, dtype=dtype)
    assert torch.equal(rows.to("tpu").sum(-1).cpu(), rows.sum(-1))
    assert torch.equal(rows[0].to("tpu").sum().cpu(), rows[0].sum())


@NEEDS_VECTORS
@DTYPES
def test_what_is_scaled_and_added_is_rounded_once(dtype):
    left, right = numbers(2, 1000, dtype=dtype)
    for operation in (torch.add, torch.sub, torch.rsub):
        on_device = operation(left.to("tpu"), right.to("tpu"), alpha=0.3)
        assert torch.equal(on_device.cpu(), operation(left, right, alpha=0.3))


@DTYPES
@pytest.mark.parametrize("number", [float("inf"), float("nan"), 1e300])
def test_infinity_stays_what_it_is(number, dtype):
    left, right = torch.tensor([1.0, number], dtype=dtype), torch.tensor([number, 1.0], dtype=dtype)
    on_device = left.to("tpu").add(right.to("tpu"), alpha=3.0)
    torch.testing.assert_close(on_device.cpu(), left.add(right, alpha=3.0), equal_nan=True)


@NEEDS_VECTORS
@DTYPES
def test_lbfgs_with_a_line_search_takes_the_steps_of_the_cpu(dtype):
    """It decides by comparisons near the limit of float32: another last digit is another way."""

    def trained(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        parameter = torch.nn.Parameter(torch.randn(27, generator=generator, dtype=dtype).to(device))
        target = torch.randn(27, generator=generator, dtype=dtype).to(device)
        optimizer = torch.optim.LBFGS([parameter], line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameter - target).square().square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return parameter.detach().cpu()

    torch.testing.assert_close(trained("tpu"), trained("cpu"))


@NEEDS_VECTORS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (32,), (5, 13), (400,)])
@pytest.mark.parametrize("alpha", [0.9, -0.3, 3])
def test_scaled_sums_of_16_bit_round_as_the_cpus(dtype, shape, alpha):
    values, others = (
        torch.randn(shape, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1)
    )
    for function in (torch.add, torch.sub):
        expected = function(values, others, alpha=alpha)
        assert torch.equal(function(values.to("tpu"), others.to("tpu"), alpha=alpha).cpu(), expected)


@NEEDS_VECTORS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (32,), (5, 13), (400,)])
def test_reciprocal_roots_of_16_bit_round_as_the_cpus(dtype, shape):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.1
    assert torch.equal(values.to("tpu").rsqrt().cpu(), values.rsqrt())
