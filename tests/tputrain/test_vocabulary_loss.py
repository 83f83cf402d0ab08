"""A model's loss without its logits: where it is taken, and that it is the same."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.tputrain.test_llama import tiny
from tputrain import linear_cross_entropy
from tputrain.cli.plan import task_of
from tputrain.models import vocabulary_loss
from tputrain.models.huggingface import build_huggingface
from tputrain.parallel.topology import Topology
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 1, "vocab_size": 96}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": tiny,
    "untied": lambda: tiny(tie_word_embeddings=False),
    "transformers": lambda: build_huggingface({"model_type": "llama", **SIZES}),
    "scaled logits": lambda: build_huggingface({"model_type": "granite", "logits_scaling": 2.0, **SIZES}),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Of the loss without logits, where even the fewest logits are not made: the shapes of its inputs."""
    made = []

    def noted(input, *others, **options):
        made.append(input.shape)
        return linear_cross_entropy(input, *others, **options)

    monkeypatch.setattr(vocabulary_loss, "MANY_LOGITS", 0)
    monkeypatch.setattr(vocabulary_loss, "linear_cross_entropy", noted)
    return made


def batch(device: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    return {"input_ids": ids.to(device), "labels": labels.to(device)}


def loss_and_gradients(model: nn.Module, device: str) -> list[torch.Tensor]:
    loss = model.to(device)(**batch(device))
    loss.backward()
    return [loss.detach().cpu(), *(each.grad.cpu() for each in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_and_the_gradients_are_those_of_the_logits(name: str, calls: list[torch.Size]) -> None:
    expected = loss_and_gradients(MODELS[name](), "cpu")
    assert calls == []  # not made of anything else on PyTorch's own devices
    for ours, theirs in zip(loss_and_gradients(MODELS[name](), "tpu"), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert len(calls) == (name != "scaled logits")  # its logits are not what its head gives


@pytest.mark.parametrize("name", ["untied", "transformers"])
def test_logits_that_are_wanted_are_made(name: str, calls: list[torch.Size]) -> None:
    model = MODELS[name]().to("tpu")
    model.gives_logits_with_loss = True
    assert model(**batch("tpu"))["logits"].shape == (2, 8, 96)
    assert model(batch("tpu")["input_ids"]).shape == (2, 8, 96)
    assert calls == []


def test_a_head_that_does_more_makes_the_logits(calls: list[torch.Size]) -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = nn.Sequential(model.lm_head, nn.Softplus())
    model.to("tpu")(**batch("tpu")).backward()
    assert calls == []


def test_a_plain_head_in_its_place_makes_the_loss(calls: list[torch.Size]) -> None:
    model = tiny(tie_word_embeddings=False)
    model.lm_head = nn.Linear(model.lm_head.in_features, 96, bias=False)
    model.to("tpu")(**batch("tpu")).backward()
    assert len(calls) == 1


def test_few_logits_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.empty(2, 8, 4, device="tpu"), torch.empty(96, 4, device="tpu")
    assert not vocabulary_loss.pays(hidden, weight)
    monkeypatch.setattr(vocabulary_loss, "MANY_LOGITS", 2 * 8 * 96 - 1)
    assert vocabulary_loss.pays(hidden, weight)
    assert not vocabulary_loss.pays(hidden.cpu(), weight)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_it_is_one_function_on_every_device(reduction: str, is_weighted: bool) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(2, 5, 4), torch.randn(7, 4), torch.randn(7)
    target = torch.randint(0, 7, (2, 5))
    target[0, 1] = -100
    token_weight = torch.rand(2, 5) if is_weighted else None
    found = []
    for device in ("cpu", "tpu"):
        given = [each.to(device).requires_grad_() for each in (hidden, weight)]
        loss = linear_cross_entropy(
            *given,
            target.to(device),
            linear_bias=bias.to(device),
            token_weight=None if token_weight is None else token_weight.to(device),
            reduction=reduction,
        )
        found.append([each.cpu() for each in (loss, *torch.autograd.grad(loss, given))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("name", ["untied", "transformers"])
def test_a_head_that_somebody_listens_to_makes_its_logits(
    name: str, kind: str, calls: list[torch.Size]
) -> None:
    model = MODELS[name]().to("tpu")
    head = model.get_output_embeddings() if name == "transformers" else model.lm_head
    seen = []

    def hook(module: nn.Module, *given: object) -> None:
        seen.append(given)

    getattr(head, f"register_{kind}")(hook)
    model(**batch("tpu")).backward()
    assert calls == []
    assert len(seen) == 1


def test_shapes_that_do_not_fit_are_refused_on_every_device() -> None:
    hidden, weight = torch.rand(2, 5, 4), torch.rand(7, 4)
    target = torch.zeros(5, 2, dtype=torch.int64)
    for device in ("cpu", "tpu"):
        with pytest.raises(ValueError, match=r"expected an? .*target"):
            linear_cross_entropy(hidden.to(device), weight.to(device), target.to(device))


def test_a_plan_counts_the_products_of_a_large_vocabulary() -> None:
    overrides = [
        "model.vocab_size=32000",
        "data.vocab_size=32000",
        "data.sequence_length=1024",
        "batch.tokens=32768",
    ]
    overrides += ["batch.sequences=32"]
    task = task_of(read_recipe(find_recipe("llama"), overrides), Topology.parse("v5e:1x1"))
    head = [
        work.product for work in task.workload.parts[-1].forward if 32000 in (work.product.m, work.product.n)
    ]
    assert head
