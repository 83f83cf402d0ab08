"""Values that the host of a TPU keeps: they come back the same, and on a TPU they do go there."""

import jax
import jax.numpy as jnp
import pytest
import torch

from tpu_backend import held_by_host, host_memory, taken_from_host
from tpu_backend.barrier import kept_after
from tpu_backend.runtime import gathers


@pytest.mark.parametrize("mode", ["fused", "strict"])
def test_what_the_host_keeps_comes_back(mode: str) -> None:
    with torch.tpu.eager_mode(mode):
        x = torch.tensor([1.0, -0.0, float("inf"), float("nan")], device="tpu")
        weight = torch.ones(3, device="tpu", dtype=torch.bfloat16)
        back, other = taken_from_host(held_by_host(x * 2), weight)
        assert other.dtype == torch.bfloat16
        torch.testing.assert_close(back.cpu(), x.cpu() * 2, rtol=0, atol=0, equal_nan=True)
        assert torch.signbit(back.cpu())[1]
        assert torch.equal(other.cpu(), torch.ones(3, dtype=torch.bfloat16))


def test_gradients_go_through() -> None:
    x = torch.linspace(-1, 1, 4, device="tpu", requires_grad=True)
    held_by_host(x.square()).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * x.detach().cpu())


def test_an_empty_one_comes_back() -> None:
    (back,) = taken_from_host(held_by_host(torch.ones(0, 4, device="tpu")))
    assert back.shape == (0, 4)


@pytest.mark.parametrize(("platform", "count"), [("tpu", 2), ("cpu", 0)])
def test_on_a_tpu_a_copy_goes_there_and_one_comes_back(platform: str, count: int) -> None:
    function = jax.jit(host_memory._there_and_back)
    lowered = function.trace(jnp.ones(4)).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count("annotate_device_placement") == count


def test_numbers_without_gradients_stay_as_they_are() -> None:
    whole = torch.tensor([2**40 + 5], device="tpu")
    assert held_by_host(whole) is whole
    back, other = taken_from_host(whole, torch.ones(1, device="tpu"))
    assert back is whole
    assert other.item() == 1


def test_what_comes_back_depends_on_the_scatters_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathers, "lowered_for", lambda: "tpu")

    def used(notes: bool) -> bool:
        def function(array: jax.Array, other: jax.Array) -> jax.Array:
            with gathers.traced_program():
                if notes:
                    gathers.scattered((other * 2,))
                return kept_after((array,), gathers.awaited())[0]

        jaxpr = jax.make_jaxpr(function)(jnp.ones(4), jnp.ones(3)).jaxpr
        return any(jaxpr.invars[1] in each.invars for each in jaxpr.eqns)

    assert used(notes=True)
    assert not used(notes=False)
