"""grouped_mm, which mixtures of experts are made of, on the device against the CPU, and its refusals."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from tpu_backend.lowering import grouped_sums
from tpu_backend.lowering.platforms import lowering_for

pytestmark = pytest.mark.usefixtures("no_fallback")

ENDS = torch.tensor([4, 4, 16], dtype=torch.int32)  # three groups, the second one empty


def _matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _product_and_gradients(
    left: Tensor,
    right: Tensor,
    ends: Tensor | None,
    device: str,
    multiply: Callable[..., Tensor] = grouped_mm,
) -> list[Tensor]:
    left, right = (matrix.to(device).requires_grad_() for matrix in (left, right))
    product = multiply(left, right, offs=None if ends is None else ends.to(device))
    gradients = torch.autograd.grad(product.square().sum(), [left, right])
    return [tensor.detach().cpu() for tensor in (product, *gradients)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right", "ends"),
    [
        pytest.param((16, 8), (3, 8, 24), ENDS, id="groups of rows"),
        pytest.param((3, 8, 24), (24, 16), ENDS, id="groups of columns"),
        pytest.param((8, 16), (16, 24), ENDS, id="groups of summands"),
        pytest.param((3, 8, 16), (3, 16, 24), None, id="batches"),
    ],
)
def test_products_and_gradients_are_the_cpus(
    left: tuple[int, ...], right: tuple[int, ...], ends: Tensor | None, dtype: torch.dtype
) -> None:
    matrices = _matrix(*left, seed=1).to(dtype), _matrix(*right, seed=2).to(dtype)
    actual, expected = (_product_and_gradients(*matrices, ends, device) for device in ("tpu", "cpu"))
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(768, [200, 0, 312, 256]), (700, [0, 90, 500, 10])], ids=["all", "not all"]
)
def test_the_kernel_for_a_tpu_sums_over_each_group(
    rows: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_sums, "_FEATURES", 128)  # the last block of columns is not full
    random = np.random.default_rng(0)
    left, right = (jnp.asarray(random.normal(size=(rows, each)), jnp.bfloat16) for each in (160, 130))
    with lowering_for("tpu"):
        assert grouped_sums.fits(left, right, jnp.asarray(sizes))
        assert not grouped_sums.fits(left, right, jnp.zeros(0, jnp.int32))
    with jax.enable_x64(True):
        found = grouped_sums.grouped_sums(left, right, jnp.asarray(sizes), jnp.bfloat16, interpret=True)
    ends = np.cumsum(sizes)
    assert found.shape == (4, 160, 130)
    for got, end, size in zip(found.astype("float32"), ends, sizes, strict=True):
        own = slice(end - size, end)
        expected = left[own].astype("float32").T @ right[own].astype("float32")
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_compile_gives_the_values_of_eager_mode(dtype: torch.dtype) -> None:
    """Tracing asks another meta kernel than the recorder: PyTorch's own takes bfloat16 alone."""
    torch._dynamo.reset()
    matrices = _matrix(16, 8, seed=1).to(dtype), _matrix(3, 8, 24, seed=2).to(dtype)
    compiled = torch.compile(lambda left, right, offs: grouped_mm(left, right, offs=offs), fullgraph=True)
    actual = _product_and_gradients(*matrices, ENDS, "tpu", compiled)
    expected = _product_and_gradients(*matrices, ENDS, "tpu")
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_other_groups_compile_nothing() -> None:
    left, right = _matrix(16, 8, seed=1).to("tpu"), _matrix(3, 8, 8, seed=2).to("tpu")

    def product(ends: list[int]) -> Tensor:
        return grouped_mm(left, right, offs=torch.tensor(ends, dtype=torch.int32, device="tpu")).cpu()

    product([4, 8, 16])
    before = torch.tpu.compile_stats()["compilations"]
    actual = product([0, 12, 16])
    assert torch.tpu.compile_stats()["compilations"] == before
    torch.testing.assert_close(actual[:12], left.cpu()[:12] @ right.cpu()[1])


@pytest.mark.parametrize(
    ("left", "right", "ends", "message"),
    [
        ((16, 8), (3, 7, 24), ENDS, "contraction dimension of mat_a and mat_b must match"),
        ((16, 8), (2, 8, 24), ENDS, "matrix batch sizes have to match"),
        ((16, 8), (3, 8, 24), None, "Have to provide offsets"),
        ((16, 8), (3, 8, 24), ENDS.long(), "Offsets have to be int32"),
    ],
)
def test_what_does_not_fit_is_refused(
    left: tuple[int, ...], right: tuple[int, ...], ends: Tensor | None, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        grouped_mm(
            _matrix(*left, seed=1).to("tpu"),
            _matrix(*right, seed=2).to("tpu"),
            offs=None if ends is None else ends.to("tpu"),
        )
