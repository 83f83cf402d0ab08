"""By what a batch is judged: a loss_fn, the model's own loss, or cross-entropy."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.tputrain.test_trainer import classifier, config, fit, losses, samples
from tputrain import ExecutionConfig, LogConfig, Trainer, UserError


class ReturnsLoss(nn.Module):
    """A classifier whose forward takes dict keys and returns its loss in some shape."""

    def __init__(self, wrap):
        super().__init__()
        self.net, self.wrap = classifier(), wrap

    def forward(self, inputs, labels):
        return self.wrap(F.cross_entropy(self.net(inputs), labels))


@pytest.mark.parametrize(
    "wrap",
    [lambda loss: loss, lambda loss: {"loss": loss, "logits": None}, lambda loss: SimpleNamespace(loss=loss)],
    ids=["scalar", "dict", "attribute"],
)
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_module_that_returns_its_loss_trains_like_the_stock_one(wrap, form):
    inputs, labels = samples(6)
    batch = {"inputs": inputs, "labels": labels} if form == "dict" else (inputs, labels)
    expected = fit(classifier(), config(), train_loader=[(inputs, labels)])
    assert losses(fit(ReturnsLoss(wrap), config(), train_loader=[batch])) == losses(expected)


def test_a_loss_fn_decides_what_the_target_is_compared_by():
    inputs = samples(6)[0]
    batch = (inputs, inputs.sum(dim=1, keepdim=True))
    torch.manual_seed(0)
    records = fit(nn.Linear(4, 1), config(steps=60), train_loader=[batch], loss_fn=F.mse_loss)
    assert records.steps[-1]["loss"] < records.steps[0]["loss"]


@pytest.mark.parametrize("form", ["fused", "captured"])
def test_a_loss_fn_that_is_a_module_is_on_the_device_of_the_model(form):
    inputs, labels = samples(6)
    weights = torch.tensor([1.0, 2.0, 3.0])
    expected = fit(
        classifier(),
        config(),
        train_loader=[(inputs, labels)],
        loss_fn=lambda output, target: F.cross_entropy(output, target, weights),
    )
    cfg = config(device="tpu", execution=ExecutionConfig(train=form))
    loss_fn, loader = nn.CrossEntropyLoss(weights), [(inputs, labels)]
    records = fit(classifier(), cfg, train_loader=loader, val_loader=loader, loss_fn=loss_fn)
    assert losses(records) == pytest.approx(losses(expected), rel=1e-5)
    assert loss_fn.weight.device.type == "tpu"


def test_parameters_of_a_loss_fn_that_nothing_trains_are_named(capsys):
    class Scaled(nn.Module):
        def __init__(self, head):
            super().__init__()
            self.head, self.scale = head, nn.Parameter(torch.ones(()))

        def forward(self, output, target):
            return F.cross_entropy(output * self.scale, target)

    model, note = classifier(), "note: loss_fn has the parameter scale: not trained and in no checkpoint"
    loss_fn = Scaled(model[2])
    Trainer(model, config(), loss_fn=loss_fn)
    assert note in capsys.readouterr().out
    loss_fn.scale.requires_grad_(False)
    Trainer(model, config(), loss_fn=loss_fn)
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_class_probabilities_are_targets_of_the_default_loss(device):
    inputs, labels = samples(6)
    mixed = 0.7 * F.one_hot(labels, 3) + 0.3 * F.one_hot(labels.flip(0), 3)
    cfg = config(device=device)
    given = fit(classifier(), cfg, train_loader=[(inputs, mixed)], loss_fn=F.cross_entropy)
    assert losses(fit(classifier(), cfg, train_loader=[(inputs, mixed)])) == losses(given)
    in_bfloat16 = [(inputs, torch.softmax(torch.randn(6, 3), dim=1).bfloat16())]
    assert fit(classifier(), cfg, train_loader=in_bfloat16).steps
    mixed[2] = 0  # a sample that is not to count
    assert fit(classifier(), cfg, train_loader=[(inputs, mixed)]).steps


class Token(nn.Module):
    """Predicts each label from the token at its place; its head begins with zeros."""

    def __init__(self, makes_loss: bool):
        super().__init__()
        self.embed, self.head, self.makes_loss = nn.Embedding(9, 4), nn.Linear(4, 9), makes_loss
        nn.init.zeros_(self.head.weight)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.embed(input_ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if self.makes_loss else logits


def test_a_loss_that_knows_no_ignored_labels_is_never_given_any():
    def one_hot(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, F.one_hot(target, 9).float())

    torch.manual_seed(0)
    batches = [(torch.randint(9, (2, 5)), torch.randint(9, (2, 5))) for _ in range(2)]
    trainer = Trainer(
        Token(False), config(steps=2), train_loader=batches, val_loader=batches, loss_fn=one_hot
    )
    trainer.fit()
    assert trainer.best["loss"] > 0


def test_a_model_that_begins_with_equal_losses_is_not_taken_for_one_that_shifts():
    torch.manual_seed(0)
    batches = []
    for length in (5, 2):
        labels = torch.randint(9, (2, 5))
        labels[:, length:] = -100
        batches.append({"input_ids": torch.randint(9, (2, 5)), "labels": labels})
    trainer = Trainer(Token(True), config(), val_loader=batches)
    nn.init.normal_(trainer.model.head.bias)
    with torch.no_grad():
        losses = [trainer.model(**batch).item() for batch in batches]
    assert trainer.validate()["loss"] == pytest.approx((10 * losses[0] + 4 * losses[1]) / 14)


@pytest.mark.parametrize("form", ["fused", "captured"])
def test_a_label_out_of_range_names_its_step(form):
    loader = [samples(6, seed) for seed in range(9)]
    loader[6][1][2] = 7
    cfg = config(steps=9, device="tpu", log=LogConfig(every=4), execution=ExecutionConfig(train=form))
    with pytest.raises(UserError, match=r"^step 7: Target 7 is out of bounds.* in aten::.*loss.py") as caught:
        fit(classifier(), cfg, train_loader=loader)
    assert "\n" not in str(caught.value)


def test_a_label_out_of_range_between_far_log_steps_names_them():
    loader = [samples(6, seed) for seed in range(99)]
    loader[6][1][2] = 7
    cfg = config(steps=99, device="tpu", log=LogConfig(every=99))
    with pytest.raises(UserError, match=r"^step \d+, or one since the last log step: Target 7 .* in aten::"):
        fit(classifier(), cfg, train_loader=loader)


def test_a_label_out_of_range_on_the_cpu_names_its_step_and_a_list_of_the_users_does_not():
    loader = [samples(6, seed) for seed in range(3)]
    loader[1][1][2] = 7
    with pytest.raises(UserError, match=r"^step 2: Target 7 is out of bounds"):
        fit(classifier(), config(steps=3, device="cpu"), train_loader=loader)
    table = torch.ones(5)
    with pytest.raises(
        UserError, match=r"^step 2: index 7 is out of bounds for dimension 0 .* at .*test_losses"
    ):
        fit(
            classifier(),
            config(steps=3, device="cpu"),
            train_loader=loader,
            loss_fn=lambda output, target: (output.sum(1) * table[target]).sum(),
        )
    with pytest.raises(IndexError, match="list index out of range"):
        fit(classifier(), config(device="cpu"), train_loader=loader, loss_fn=lambda output, target: [][0])


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_a_label_out_of_range_names_the_evaluation_or_the_step_before_it(device):
    good, bad = samples(6, 0), samples(6, 1)
    bad[1][2] = 7
    cfg = config(steps=2, device=device, log=LogConfig(every=99), evaluate_first=False)
    with pytest.raises(UserError, match=r"^evaluating at step 2: Target 7 is out of bounds"):
        fit(classifier(), cfg, train_loader=[good, good], val_loader=[good, bad])
    with pytest.raises(UserError, match=r"^step \d.*: Target 7 is out of bounds"):
        fit(classifier(), cfg, train_loader=[good, bad], val_loader=[good])


def test_a_loss_without_a_gradient_is_one_line():
    def detached(output, target):
        return F.cross_entropy(output, target).detach()

    with pytest.raises(UserError, match=r"^the loss has no gradient: .* detach\(\)"):
        fit(classifier(), config(steps=1, device="cpu"), train_loader=[samples(6, 0)], loss_fn=detached)


def test_class_weights_over_counted_labels_do_not_depend_on_micro_batches():
    weight = torch.tensor([0.1, 1.0, 5.0])

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, weight, reduction="sum") / (target != -100).sum()

    halves = [samples(6, seed) for seed in range(2)]
    halves[1][1][:4] = -100
    whole = [tuple(torch.cat(each) for each in zip(*halves, strict=True))]
    expected = fit(classifier(), config(), train_loader=whole, loss_fn=weighted)
    found = fit(classifier(), config(accumulate=2), train_loader=halves, loss_fn=weighted)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
