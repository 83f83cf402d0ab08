"""A linear layer with its cross-entropy: the values and gradients of both, without all of the logits."""

import re

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tpu_backend import linear_cross_entropy
from tpu_backend.lowering import linear_cross_entropy as lowering
from tpu_backend.lowering.platforms import lowering_for

TOKENS, FEATURES, CLASSES = 11, 5, 9


@pytest.fixture(autouse=True)
def blocks_of_four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "BLOCK_BYTES", 4 * CLASSES * 8)


def given(dtype: torch.dtype, has_bias: bool = True) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(TOKENS, FEATURES), torch.randn(CLASSES, FEATURES), torch.randn(CLASSES)
    target = torch.randint(0, CLASSES, (TOKENS,))
    target[[1, 10]] = -100
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype) if has_bias else None, target


def reference(hidden, weight, bias, target, token_weight, reduction):
    losses = F.cross_entropy(F.linear(hidden, weight, bias), target, reduction="none")
    weights = (target != -100).to(losses.dtype) * (1 if token_weight is None else token_weight)
    total = (losses * weights).sum()
    return total / weights.sum() if reduction == "mean" else total


def gradients(loss, *tensors):
    wanted = [each for each in tensors if each is not None]
    return loss.detach().cpu(), *(each.cpu() for each in torch.autograd.grad(loss * 3, wanted))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("has_bias", "is_weighted"), [(False, False), (True, True)])
def test_values_and_gradients_are_those_of_both(reduction: str, has_bias: bool, is_weighted: bool) -> None:
    *floats, target = given(torch.float64, has_bias)
    token_weight = torch.rand(TOKENS, dtype=torch.float64) if is_weighted else None
    torch.tpu.reset_fallback_stats()  # of other tests in this process
    own = [None if each is None else each.to("tpu").requires_grad_() for each in floats]
    floats = [None if each is None else each.requires_grad_() for each in floats]
    expected = gradients(reference(*floats, target, token_weight, reduction), *floats)
    hidden, weight, bias = own
    loss = linear_cross_entropy(
        hidden.view(1, TOKENS, FEATURES),
        weight,
        target.to("tpu").view(1, TOKENS),
        linear_bias=bias,
        token_weight=None if token_weight is None else token_weight.to("tpu").view(1, TOKENS),
        reduction=reduction,
    )
    found = gradients(loss, *own)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        alone = linear_cross_entropy(hidden, weight, target.to("tpu"), linear_bias=bias, reduction=reduction)
    torch.testing.assert_close(alone.cpu(), reference(*floats, target, None, reduction).detach())
    assert torch.tpu.fallback_stats() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_numbers_multiply_as_they_are_and_the_loss_is_float32(dtype: torch.dtype) -> None:
    *floats, target = given(dtype)
    own = [each.to("tpu").requires_grad_() for each in floats]
    wide = [each.double().requires_grad_() for each in floats]
    expected = gradients(reference(*wide, target, None, "mean"), *wide)
    found = gradients(linear_cross_entropy(own[0], own[1], target.to("tpu"), linear_bias=own[2]), *own)
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), expected[0], rtol=1e-6, atol=0)
    for ours, theirs in zip(found[1:], expected[1:], strict=True):
        assert ours.dtype == dtype
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


def test_under_autocast_it_is_cast_as_linear_is() -> None:
    hidden, weight, _, target = given(torch.float32)
    own = [each.to("tpu").requires_grad_() for each in (hidden, weight)]
    rounded = [each.to("tpu", torch.bfloat16).requires_grad_() for each in (hidden, weight)]
    with torch.autocast("tpu", torch.bfloat16):
        found = gradients(linear_cross_entropy(*own, target.to("tpu")), *own)
    expected = gradients(linear_cross_entropy(*rounded, target.to("tpu")), *rounded)
    assert [each.dtype for each in found] == [torch.float32] * 3
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs.float())


def test_where_no_token_counts_the_mean_is_nan_and_nothing_has_a_gradient() -> None:
    hidden, weight, _, _ = given(torch.float32)
    own = [each.to("tpu").requires_grad_() for each in (hidden, weight)]
    loss, *found = gradients(linear_cross_entropy(*own, torch.full((TOKENS,), -100, device="tpu")), *own)
    assert loss.isnan()
    assert not any(each.any() for each in found)


def test_a_graph_of_torch_compile_has_it() -> None:
    hidden, weight, _, target = given(torch.float32)
    own = [each.to("tpu").requires_grad_() for each in (hidden, weight)]
    compiled = torch.compile(linear_cross_entropy, backend="tpu", fullgraph=True)
    found = gradients(compiled(*own, target.to("tpu")), *own)
    for ours, theirs in zip(found, gradients(linear_cross_entropy(*own, target.to("tpu")), *own)):
        torch.testing.assert_close(ours, theirs)


def test_what_does_not_fit_is_refused_in_one_line() -> None:
    hidden, weight, bias, target = (each.to("tpu") for each in given(torch.float32))
    with pytest.raises(ValueError, match=r"reduction='none': expected 'mean' or 'sum'"):
        linear_cross_entropy(hidden, weight, target, reduction="none")
    with pytest.raises(
        TypeError, match=r"expected one dtype of floats, got .*linear_weight of torch.bfloat16"
    ):
        linear_cross_entropy(hidden, weight.bfloat16(), target)
    with pytest.raises(ValueError, match=r"expected an int64 target \(11,\), got torch.int64 \(3,\)"):
        linear_cross_entropy(hidden, weight, target[:3])
    with pytest.raises(ValueError, match=r"expected \(\.\.\., E\) and \(V, E\)"):
        linear_cross_entropy(hidden, weight[:, 1:], target)
    with pytest.raises(ValueError, match=r"expected a linear_bias of \(V,\)"):
        linear_cross_entropy(hidden, weight, target, linear_bias=bias[1:])
    with pytest.raises(ValueError, match=r"expected a token_weight \(11,\)"):
        linear_cross_entropy(hidden, weight, target, token_weight=target[:3])
    with pytest.raises(IndexError, match=f"Target {CLASSES} is out of bounds"):
        linear_cross_entropy(hidden, weight, torch.full_like(target, CLASSES)).item()
    loss = linear_cross_entropy(hidden.requires_grad_(), weight, target)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def lowered(tokens: int, classes: int, features: int) -> jax.stages.Lowered:
    def loss(hidden, weight, target):
        return lowering.linear_cross_entropy(hidden, weight, target, None, None, -100, (True, True, False))

    sizes = [((tokens, features), jnp.float32), ((classes, features), jnp.float32), ((tokens,), jnp.int64)]
    with jax.enable_x64(True):
        return jax.jit(loss).lower(*(jax.ShapeDtypeStruct(*each) for each in sizes))


def test_memory_does_not_hold_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "BLOCK_BYTES", 2**20)
    tokens, classes, features = 8192, 4096, 16

    def temporaries(tokens: int) -> int:
        return lowered(tokens, classes, features).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(tokens) < tokens * classes * 4 / 16  # whole logits take 128 MiB
    assert temporaries(2 * tokens) - temporaries(tokens) < 4 * tokens * features * 4


def test_blocks_are_counted_in_32_bits() -> None:
    # A TPU's compiler does not know the turns of a loop that counts in 64, and no prediction counts them.
    text = lowered(64, CLASSES, FEATURES).as_text()
    (condition,) = re.findall(r"cond \{(.*?)\} do", text, re.DOTALL)
    assert "compare LT" in condition
    assert "tensor<i64>" not in condition


def test_on_a_tpu_the_gradient_of_the_weight_comes_last() -> None:
    def gradients(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
        ones = jnp.ones(len(hidden))
        sums, of_hidden = lowering._block(hidden, ones.astype(int), ones, weight, None, (True, True, False))
        return of_hidden, sums.grad_weight

    with lowering_for("tpu"):
        jaxpr = jax.make_jaxpr(gradients)(jnp.ones((4, FEATURES)), jnp.ones((CLASSES, FEATURES))).jaxpr
    (barrier,) = [each for each in jaxpr.eqns if each.primitive.name == "optimization_barrier"]
    _, of_hidden, of_weight = [each for each in jaxpr.eqns if each.primitive.name == "dot_general"]
    assert barrier.invars == [jaxpr.invars[0], *of_hidden.outvars]
    assert barrier.outvars[0] in of_weight.invars


def test_on_a_tpu_a_block_has_as_many_tokens_as_there_are_features() -> None:
    # Each block reads all weights, and all sums for their gradient.
    with lowering_for("tpu"):
        assert lowered(64, CLASSES, 64).as_text().count("while") == 0
        assert lowered(64, CLASSES, 32).as_text().count("while") == 1
