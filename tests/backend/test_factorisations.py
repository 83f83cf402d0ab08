"""Batches of factorisations: as on the CPU, and none waits for another for ever."""

import pytest
import torch

from tests.backend.fresh_process import run_python


def matrices(*batch: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*batch, 4, 4, dtype=dtype, generator=generator)
    return values @ values.mH + torch.eye(4, dtype=dtype)


FUNCTIONS = {
    "cholesky": torch.linalg.cholesky,
    "eigh": lambda a: torch.linalg.eigh(a)[0],
    "svd": lambda a: torch.linalg.svd(a)[1],
    "qr": lambda a: torch.linalg.qr(a)[0].abs(),
    "inv": torch.linalg.inv,
    "solve": lambda a: torch.linalg.solve(a, a[..., :2]),
    "det": torch.linalg.det,
    "triangular": lambda a: torch.linalg.solve_triangular(a.tril(), a, upper=False),
    "lu": lambda a: torch.linalg.lu_factor(a),
    "householder": lambda a: torch.linalg.householder_product(*torch.geqrf(a)).abs(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_a_batch_is_its_matrices(name, batch, dtype):
    torch.tpu.reset_fallback_stats()
    for a in (matrices(*batch, dtype=dtype), torch.empty(*batch, 0, 0, dtype=dtype)):
        expected = FUNCTIONS[name](a)
        torch.testing.assert_close(
            FUNCTIONS[name](a.to("tpu")), expected, check_device=False, rtol=1e-9, atol=1e-9
        )
    assert torch.tpu.fallback_stats() == {}


def test_many_at_once_end():
    """On two cores jaxlib's own batches stood still within a few of these steps."""
    done = run_python(
        """
        import torch
        a = torch.randn(512, 16, 16).tril().to("tpu") + 8 * torch.eye(16, device="tpu")
        b = torch.randn(512, 16, 16).to("tpu")
        for _ in range(60):
            many = [torch.linalg.solve_triangular(a + i, b, upper=False).sum() for i in range(8)]
            many += [torch.linalg.cholesky(a @ a.mT + i).sum() for i in range(8)]
            torch.stack(many).sum().item()
        print("done")
        """
    )
    assert done.stdout == "done\n", done.stderr
