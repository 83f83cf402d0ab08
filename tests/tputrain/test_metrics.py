"""The numbers that a run is judged by: FLOPs and MFU, step times, evaluation sets, metrics by name."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.tputrain.kept_records import KeptRecords
from tputrain import LogConfig, RunConfig, Trainer, TrainerConfig, UserError
from tputrain.callbacks.callback import Callback
from tputrain.metrics.flops import count_flops
from tputrain.metrics.named import (
    accuracy,
    mean_absolute_error,
    metric_functions,
    next_token_accuracy,
    top5_accuracy,
)
from tputrain.metrics.peak_flops import peak_flops
from tputrain.metrics.step_log import StepLog
from tputrain.models.llama import Llama, LlamaConfig


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def samples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def fit(model: nn.Module, cfg: RunConfig, **arguments) -> KeptRecords:
    records = KeptRecords()
    Trainer(model, cfg, loggers=[records], **arguments).fit()
    return records


def config(device: str = "cpu", peak: float | None = None, **trainer) -> RunConfig:
    log = LogConfig(every=3, progress="none", peak_flops=peak)
    return RunConfig(device=device, log=log, trainer=TrainerConfig(**({"steps": 7} | trainer)))


# 5 samples: forward 2*5*(4*8 + 8*3), the gradients of both matrices as much, of the hidden values 2*5*8*3.
CLASSIFIER_FLOPS = 560 + 560 + 240


def test_flops_are_those_of_forward_and_backward_products():
    assert count_flops(classifier(), samples(5)) == CLASSIFIER_FLOPS


def test_flops_of_a_llama_are_three_times_its_forward_products_and_attention():
    B, S, D, H, V, layers, hidden, inner = 2, 16, 8, 4, 50, 3, 32, 48
    model = Llama(LlamaConfig(V, hidden, inner, layers, H, 2, D, 64))
    ids = torch.zeros(B, S, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "position_ids": ids, "document_ids": ids}
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() == 2
    )  # the tied one is the head
    forward = 2 * B * S * matrices + layers * 2 * (2 * B * H * S * S * D)
    assert count_flops(model, batch) == 3 * forward


def test_frozen_parameters_count_less_and_what_is_computed_again_does_not_count():
    model = classifier()
    model[0].requires_grad_(False)
    assert count_flops(model, samples(5)) == 560 + 240

    class Checkpointed(nn.Sequential):
        def forward(self, inputs):
            return checkpoint(super().forward, inputs, use_reentrant=False)

    layers = [nn.Linear(4, 4) for _ in range(4)]
    batch = torch.ones(5, 4), torch.zeros(5, dtype=torch.int64)
    layer = 2 * 5 * 4 * 4
    assert count_flops(nn.Sequential(*layers), batch) == (4 + 4 + 3) * layer
    assert (
        count_flops(Checkpointed(*layers), batch) == 3 * 4 * layer
    )  # its backward pass has 4 + 4 + 3 itself


def test_counting_draws_no_random_number_and_leaves_no_gradient():
    model = nn.Sequential(classifier(), nn.Dropout(0.5), nn.BatchNorm1d(3))
    before, running = torch.get_rng_state(), model[2].running_mean.clone()
    count_flops(model, samples(5))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model[2].running_mean, running)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_mfu_is_the_share_of_the_peak_that_the_model_comes_to(device):
    records = fit(classifier(), config(device, peak=1e9, accumulate=2), train_loader=[samples(5)])
    for record in records.steps:
        assert record["mfu"] == pytest.approx(2 * CLASSIFIER_FLOPS / record["step_seconds"] / 1e9)


def test_where_the_peak_is_not_known_there_is_no_mfu():
    records = fit(classifier(), config(), train_loader=[samples(5)])
    assert not any("mfu" in record for record in records.steps)
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("NVIDIA H200") == 989e12
    for unknown in ("TPU v5x", "NVIDIA H100", "cpu", None):
        assert peak_flops(unknown) is None


def test_a_model_that_cannot_be_counted_trains_without_mfu_and_the_reason_is_said(capsys):
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = classifier()

        def forward(self, inputs):
            return self.net(inputs * inputs.abs().max().item())

    records = fit(Reads(), config(peak=1e9), train_loader=[samples(5)])
    assert len(records.steps) == 7
    assert not any("mfu" in record for record in records.steps)
    said = capsys.readouterr().out
    assert said.count("note: no MFU, the model's operations cannot be counted: ") == 1


def test_the_loss_is_the_same_bits_with_and_without_mfu_and_metrics():
    def losses(**settings) -> list[str]:
        model = nn.Sequential(classifier(), nn.Dropout(0.5))
        records = fit(model, config(**settings), train_loader=[samples(5)], val_loader=[samples(4)])
        return [record["loss_hex"] for record in records.steps]

    assert losses(peak=1e9, metrics=["accuracy"]) == losses()


def test_nothing_is_read_between_log_steps_with_mfu_metrics_and_callbacks():
    class HostReads(Callback):
        seen: list[int] = []  # noqa: RUF012

        def on_step_end(self, trainer):
            self.seen.append(torch.tpu.compile_stats()["host_reads"])

    fit(classifier(), config("tpu", peak=1e9), train_loader=[samples(5)], callbacks=[HostReads()])
    reads = [after - before for before, after in zip(HostReads.seen, HostReads.seen[1:])]
    assert [reads[step] for step in (1, 3, 4)] == [
        0,
        0,
        0,
    ]  # from step 2 to 3, 4 to 5, 5 to 6: no log in between
    assert reads[2] > 0  # the log step 3


def test_percentiles_share_the_wait_for_the_read_and_leave_out_steps_that_compiled(monkeypatch):
    now = [0.0]
    compiled = [0]
    monkeypatch.setattr("tputrain.metrics.step_log.time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr("tputrain.metrics.step_log.devices.compilations", lambda device: compiled[0])

    class Waits:
        """A loss that takes a second to read, the first of them."""

        def item(self) -> float:
            now[0] += 1.0
            return 0.5

    log = StepLog(torch.device("cpu"))
    for step, seconds in enumerate([50.0, 1.0, 2.0, 3.0, 4.0], start=1):
        with log.waiting():  # three quarters of it for its data
            now[0] += seconds * 3 / 4
        now[0] += 7.0  # of something else
        log.begin()
        now[0] += seconds / 4
        compiled[0] += step == 1
        log.end(step, Waits() if step == 1 else torch.tensor(0.5), torch.tensor(1.0), 1, {})
    records = log.drain("samples")
    assert records[-1]["step_seconds"] == pytest.approx((60.0 + 1.0) / 5)
    assert records[-1]["data_wait"] == pytest.approx(45.0 / 61.0)
    assert records[-1]["step_seconds_p50"] == pytest.approx(2.5 + 0.2)
    assert records[-1]["step_seconds_p90"] == pytest.approx(3.7 + 0.2)
    assert records[-1]["step_seconds_p99"] == pytest.approx(3.97 + 0.2)


def test_callbacks_count_in_the_time_of_a_step_and_evaluations_do_not(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("tputrain.metrics.step_log.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Callback):
        def on_step_start(self, trainer):
            now[0] += 1.0

        def on_step_end(self, trainer):
            now[0] += 4.0

    def slow_metric(output, target):
        now[0] += 100.0
        return 0.0

    data = {"train_loader": [samples(10)], "val_loader": [samples(4)], "metrics": {"slow": slow_metric}}
    records = fit(classifier(), config(evaluate_every=2), callbacks=[Slow()], **data)
    for record in records.steps:
        assert record["step_seconds"] == record["host_seconds"] == record["step_seconds_p50"] == 5.0
        assert record["samples_per_second"] == 2.0


def test_evaluation_sets_are_measured_each_and_the_first_one_judges(capsys):
    sets = {"near": [samples(4)], "far.away": [samples(6, seed=2), samples(2, seed=3)]}
    cfg = config(metrics=["accuracy"], evaluate_every=None)
    records = fit(classifier(), cfg, train_loader=[samples(4)], val_loader=sets)
    first = records.evaluations[0]
    model = classifier()
    for name, batches in sets.items():
        inputs, labels = (torch.cat(parts) for parts in zip(*batches))
        output = model(inputs)
        assert first[f"{name}/loss"] == pytest.approx(F.cross_entropy(output, labels).item(), rel=1e-5)
        assert first[f"{name}/accuracy"] == pytest.approx((output.argmax(1) == labels).float().mean().item())
    assert first["loss"] == first["near/loss"]
    assert "evaluating far.away at step 0 ..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("val_loader", "message"),
    [
        ({}, "val_loader is an empty mapping: expected a loader by name, or None"),
        ({"a/b": [samples(2)]}, "val_loader: 'a/b': expected a name of letters, digits"),
        ({"good": [samples(2)], "none": []}, "val_loader gave no batch"),
        (
            {"good": [samples(2)], "bad": [(torch.full((2, 4), math.nan), torch.tensor([0, 1]))]},
            "bad/loss is nan",
        ),
    ],
)
def test_a_mistake_in_evaluation_sets_is_one_line(val_loader, message):
    with pytest.raises(UserError, match=message):
        fit(classifier(), config(), train_loader=[samples(2)], val_loader=val_loader)


LOGITS = torch.tensor([[0.1, 0.9, 0, 0, 0, 0, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1, 0.6, 0.0]])


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_metrics_by_name_are_what_they_say(device):
    logits = LOGITS.to(device)
    labels = torch.tensor([1, 4], device=device)
    assert accuracy(logits, labels).item() == 0.5
    assert top5_accuracy(logits, torch.tensor([1, 6], device=device)).item() == 0.5
    ignored = torch.tensor([1, -100], device=device)
    assert accuracy({"logits": logits}, ignored).item() == 1.0
    assert accuracy(SimpleNamespace(logits=logits[None]), ignored[None]).item() == 1.0
    # Cross-entropy wants the classes of a bare tensor in the second dimension.
    assert accuracy(logits.T[None], labels[None]).item() == 0.5
    tokens = torch.tensor([[3, 1]], device=device)
    assert next_token_accuracy({"logits": logits[None]}, tokens).item() == 1.0
    error = mean_absolute_error(
        torch.tensor([1.0, 2.0], device=device), torch.tensor([2.0, 4.0], device=device)
    )
    assert error.item() == 1.5


def test_a_run_measures_what_its_configuration_names():
    cfg = config(metrics=["accuracy", "perplexity"])
    records = fit(classifier(), cfg, train_loader=[samples(8)], val_loader=[samples(8)])
    for record in records.evaluations:
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        assert 0.0 <= record["accuracy"] <= 1.0
    assert metric_functions(["perplexity"]) == {}


class OnlyLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = classifier()

    def forward(self, inputs, labels):
        return F.cross_entropy(self.net(inputs), labels)


def test_a_metric_that_cannot_be_measured_is_one_line():
    with pytest.raises(
        UserError, match=r"trainer.metrics=acuracy: expected one of .*; did you mean accuracy\?"
    ):
        TrainerConfig(metrics=["acuracy"])
    cfg = config(metrics=["accuracy"])
    with pytest.raises(UserError, match="the model returns a scalar loss, and metrics compare its logits"):
        fit(OnlyLoss(), cfg, train_loader=[samples(4)], val_loader=[samples(4)])
    with pytest.raises(UserError, match=r"an output of shape \(2, 7\) with a target of shape \(3,\)"):
        accuracy(LOGITS, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(
    "kind", [float, np.float32, np.float64, torch.tensor, lambda share: torch.tensor([[share]])]
)
def test_a_metric_may_return_a_number_or_one_element(device, kind):
    def share_of_first(output, target):
        return kind((target == 0).float().mean().item())

    inputs, labels = samples(10)
    loader = [(inputs[:3], labels[:3]), (inputs[3:], labels[3:])]
    trainer = Trainer(classifier(), config(device), val_loader=loader, metrics={"first": share_of_first})
    assert trainer.validate()["first"] == pytest.approx((labels == 0).float().mean().item())


def test_a_metric_may_return_whole_numbers_and_truths():
    for value in (2, True, np.int64(3), np.bool_(False)):
        metrics = {"m": lambda output, target, value=value: value}
        trainer = Trainer(classifier(), config(), val_loader=[samples(4)], metrics=metrics)
        assert trainer.validate()["m"] == float(value)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (None, "None"),
        ("good", "'good'"),
        ({"a": 1.0}, "a dict"),
        (torch.ones(4), r"a tensor of shape \(4,\)"),
    ],
)
def test_a_metric_that_returns_no_number_is_one_line(value, what):
    metrics = {"m": lambda output, target: value}
    trainer = Trainer(classifier(), config(), val_loader=[samples(4)], metrics=metrics)
    with pytest.raises(UserError, match=rf"metrics\['m'\] returned {what}: expected a number or a tensor of"):
        trainer.validate()


def test_a_recipe_names_metrics_and_callbacks(tmp_path):
    from tputrain.recipe import config_from_json, read_recipe

    path = tmp_path / "my.yaml"
    path.write_text("trainer: {metrics: [perplexity]}\ncallbacks: {early_stopping: {patience: 3}}")
    cfg = read_recipe(path, ["trainer.metrics=[accuracy, perplexity]", "log.wandb.mode=offline"])
    assert cfg.trainer.metrics == ["accuracy", "perplexity"]
    assert type(cfg.trainer.metrics) is list
    assert (cfg.callbacks.early_stopping.patience, cfg.log.wandb.mode) == (3, "offline")
    from dataclasses import asdict

    assert config_from_json(asdict(cfg), "state.json") == cfg
    with pytest.raises(UserError, match=r"trainer.metrics='accuracy': expected a list such as \[a, b\]"):
        read_recipe(path, ["trainer.metrics=accuracy"])
