"""Sums and products of a few float32 numbers on the CPU: those of PyTorch's CPU kernels to the bit."""

import pytest
import torch

from tpu_backend.lowering import few_numbers

SIZES = [1, 2, 3, 4, 7, 8, 9, 12, 16, 27, 31]
NEEDS_VECTORS = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="PyTorch adds in another order on a CPU without AVX2",
)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[-1]))


@NEEDS_VECTORS
@pytest.mark.parametrize("size", [*SIZES, 32, 33, 63, 64, 100, few_numbers._MOST_ADDED])
def test_a_row_is_added_in_the_order_of_the_cpu(size):
    rows = numbers(20, size)
    assert torch.equal(rows.to("tpu").sum(-1).cpu(), rows.sum(-1))
    assert torch.equal(rows[0].to("tpu").sum().cpu(), rows[0].sum())


@NEEDS_VECTORS
@pytest.mark.parametrize("size", SIZES)
def test_what_is_scaled_and_added_is_rounded_once(size):
    left, right = numbers(2, size)
    for operation in (torch.add, torch.sub, torch.rsub):
        on_device = operation(left.to("tpu"), right.to("tpu"), alpha=0.3)
        assert torch.equal(on_device.cpu(), operation(left, right, alpha=0.3))


@NEEDS_VECTORS
@pytest.mark.parametrize("seed", range(4))
def test_lbfgs_with_a_line_search_takes_the_steps_of_the_cpu(seed):
    """It decides by comparisons near the limit of float32: another last digit is another way."""

    def trained(device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        parameter = torch.nn.Parameter(torch.randn(27, generator=generator).to(device))
        target = torch.randn(27, generator=generator).to(device)
        optimizer = torch.optim.LBFGS([parameter], line_search_fn="strong_wolfe")

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (parameter - target).square().square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return parameter.detach().cpu()

    torch.testing.assert_close(trained("tpu"), trained("cpu"))
