"""The training loop: what it computes, what it asks of models and loaders, what it tells."""

import math
import os
import random
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.tputrain.kept_records import KeptRecords
from tputrain import (
    CheckpointConfig,
    LogConfig,
    OptimConfig,
    RunConfig,
    ScheduleConfig,
    Trainer,
    TrainerConfig,
    UserError,
)
from tputrain.callbacks.best_checkpoint import BestCheckpointConfig
from tputrain.callbacks.callback import Callback
from tputrain.callbacks.config import CallbacksConfig
from tputrain.metrics.evaluation import MEASURED
from tputrain.signals import Interrupted

QUIET = LogConfig(every=3, progress="none")


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def samples(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)


def config(steps: int = 5, **changes) -> RunConfig:
    trainer = {key: changes.pop(key) for key in list(changes) if key in TrainerConfig.__dataclass_fields__}
    settings = {"device": "cpu", "log": QUIET, "trainer": TrainerConfig(steps=steps, **trainer)}
    return RunConfig(**(settings | changes))


def fit(model, cfg, **arguments) -> KeptRecords:
    records = KeptRecords()
    Trainer(model, cfg, loggers=[records], **arguments).fit()
    return records


def losses(records: KeptRecords) -> list[float]:
    return [record["loss"] for record in records.steps]


def test_a_stock_module_trains_exactly_as_a_loop_written_by_hand():
    batch = samples(12)
    schedule = ScheduleConfig(name="cosine", warmup_steps=2)
    cfg = config(
        steps=8, optim=OptimConfig(learning_rate=0.02, weight_decay=0.3), schedule=schedule, max_grad_norm=0.3
    )
    ours = fit(classifier(), cfg, train_loader=[batch])

    model = classifier()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    expected, norms = [], []
    for step in range(8):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_([*matrices, *vectors], 0.3).item())
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * schedule.factor(step, 8)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert losses(ours) == expected
    assert [record["grad_norm"] for record in ours.steps] == norms


def test_accumulation_is_weighted_by_labels_so_the_cut_does_not_matter():
    inputs, labels = samples(12)
    labels[:5] = -100  # the first micro-batch has one label left, the second six

    def micro_batches(*cuts: int):
        return list(zip(inputs.split(cuts), labels.split(cuts)))

    whole = fit(classifier(), config(), train_loader=micro_batches(12))
    cut = fit(classifier(), config(accumulate=2), train_loader=micro_batches(6, 6))
    uneven = fit(classifier(), config(accumulate=3), train_loader=micro_batches(4, 3, 5))
    assert losses(cut) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(uneven) == pytest.approx(losses(whole), rel=1e-5)  # its first has no label at all


class Causal(nn.Module):
    """A language model of one's own, with the next token's loss: `shifts` its labels itself, or not."""

    def __init__(self, shifts: bool):
        super().__init__()
        torch.manual_seed(2)
        self.shifts, self.net = shifts, nn.Sequential(nn.Embedding(11, 6), nn.Dropout(0.0), nn.Linear(6, 11))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(input_ids)
        pairs = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
        return {"loss": F.cross_entropy(*(each.flatten(0, 1) for each in pairs)), "logits": logits}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(2)
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, **settings)
    )


def ragged_rows() -> dict[str, Tensor]:
    """Rows of 8, 2, 5 and 3 tokens, filled up; the third has learned nothing of its first two."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(11, (4, 8), generator=generator)
    labels = ids.masked_fill(torch.arange(8) >= torch.tensor([8, 2, 5, 3])[:, None], -100)
    labels[2, :2] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(
    ("model", "device"),
    [
        pytest.param(lambda: Causal(True), "cpu", id="shifts"),
        pytest.param(lambda: Causal(True), "tpu", id="shifts-tpu"),
        pytest.param(lambda: Causal(False), "cpu", id="does-not"),
        pytest.param(gpt2, "cpu", id="transformers"),
    ],
)
def test_rows_of_unequal_length_weigh_alike_however_they_are_cut(model, device):
    rows = ragged_rows()

    def cut(*sizes: int) -> list[dict[str, Tensor]]:
        parts = zip(*(each.split(sizes) for each in rows.values()), strict=True)
        return [dict(zip(rows, part, strict=True)) for part in parts]

    def train(*sizes: int, evaluated: bool) -> tuple[list[float], list[float], list[float]]:
        cfg = config(steps=3, device=device, accumulate=len(sizes), max_grad_norm=0.1)
        loaders = {"train_loader": cut(*sizes)} | ({"val_loader": cut(*sizes)} if evaluated else {})
        records = fit(model(), cfg, **loaders)
        norms = [record["grad_norm"] for record in records.steps]
        return losses(records), norms, [record["loss"] for record in records.evaluations]

    whole = train(4, evaluated=True)
    for sizes in ((1, 1, 1, 1), (1, 3)):
        for evaluated in (True, False):
            for ours, expected in zip(train(*sizes, evaluated=evaluated), whole, strict=True):
                assert ours == pytest.approx(expected if ours else [], rel=1e-4)


def test_batches_by_step_are_asked_for_by_step_and_micro_batch():
    class Loader:
        asked: list[tuple[int, int]] = []  # noqa: RUF012

        def batch_at(self, step: int, micro: int):
            self.asked.append((step, micro))
            return samples(3, seed=step * 2 + micro)

    fit(classifier(), config(steps=2, accumulate=2), train_loader=Loader())
    assert Loader.asked == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_values_are_read_at_log_steps_and_every_step_is_logged_once():
    records = fit(classifier(), config(steps=8), train_loader=[samples(4)])
    assert [record["step"] for record in records.steps] == list(range(1, 9))
    assert records.drains == [1, 2, 3, 2]  # the first step of a process, then 3, 6 and the end
    for record in records.steps:
        assert float.fromhex(record["loss_hex"]) == record["loss"]
        assert record["samples"] == 4 * record["step"]
        assert 0.0 <= record["data_wait"] <= 1.0
        assert record["step_seconds"] > 0
        assert record["samples_per_second"] > 0
        assert record["compilations"] == 0
        assert record["peak_memory_bytes"] > 2**20


def test_text_is_counted_in_tokens_and_judged_by_perplexity_and_bits_per_byte():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 5)

        def forward(self, input_ids, labels):
            return F.cross_entropy(self.head(self.embed(input_ids)).flatten(0, 1), labels.flatten())

    class Validation(list):
        def bytes_of(self, batch):
            return int((batch["labels"] != -100).sum()) * len(batch["input_ids"])  # 2, and then 3 a label

    batch = {"input_ids": torch.zeros(2, 7, dtype=torch.int64), "labels": torch.ones(2, 7, dtype=torch.int64)}
    longer = {name: values.repeat(3, 1)[:3] for name, values in batch.items()}
    longer["labels"][0, :4] = -100
    unseen = {name: values.repeat(5, 1) for name, values in batch.items()}
    loader = Validation([batch, longer, unseen])
    records = fit(Text(), config(steps=2, evaluate_batches=2), train_loader=[batch], val_loader=loader)
    assert [record["tokens"] for record in records.steps] == [14, 28]
    for evaluation in records.evaluations:
        bits = evaluation["loss"] / math.log(2) * (14 + 17)
        assert evaluation["perplexity"] == pytest.approx(math.exp(evaluation["loss"]))
        assert evaluation["bits_per_byte"] == pytest.approx(bits / (14 * 2 + 17 * 3))


def test_an_evaluation_is_the_mean_over_all_labels_without_dropout_and_leaves_the_mode():
    model = nn.Sequential(classifier(), nn.Dropout(0.5))
    inputs, labels = samples(10)
    labels[2] = -100
    trainer = Trainer(
        model,
        config(),
        val_loader=[(inputs[:3], labels[:3]), (inputs[3:], labels[3:])],
    )
    result = trainer.validate()
    assert result["loss"] == pytest.approx(F.cross_entropy(model[0](inputs), labels).item(), rel=1e-6)
    assert model.training
    assert not any(parameter.grad is not None for parameter in model.parameters())


class Draws(nn.Module):
    """Draws from every generator there is: torch's, the device's, NumPy's and Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.dropout = nn.Linear(4, 3), nn.Dropout(0.3)

    def forward(self, inputs: Tensor) -> Tensor:
        scale = 1 + 0.1 * (random.random() + np.random.rand() + torch.rand(()).item())
        noise = torch.rand_like(inputs) if self.training else torch.randn_like(inputs)
        return self.net(self.dropout(inputs * scale + noise))


class DrawsToo(Callback):
    def on_evaluate(self, trainer: Trainer, result: dict) -> None:
        random.random(), np.random.rand(), torch.rand(3), torch.rand(3, device=trainer.device)


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("shares_a_generator", [False, True])
def test_how_often_a_run_is_evaluated_changes_no_step_of_it(tmp_path, device, shares_a_generator):
    torch.ones(1, device=device)  # JAX, as it is imported, draws from NumPy's generator

    def train(evaluate_every: int) -> list[str]:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        generator = torch.Generator().manual_seed(7) if shares_a_generator else None
        data = TensorDataset(*samples(22))
        loader, evaluation = (
            DataLoader(data, batch_size=3, shuffle=True, generator=generator) for _ in range(2)
        )
        cfg = config(
            steps=9,
            device=device,
            accumulate=2,
            evaluate_every=evaluate_every,
            run_dir=str(tmp_path / str(evaluate_every)),
            callbacks=CallbacksConfig(best_checkpoint=BestCheckpointConfig(metric="loss")),
        )
        arguments = {"train_loader": loader, "val_loader": evaluation, "callbacks": [DrawsToo()]}
        return [record["loss_hex"] for record in fit(Draws(), cfg, **arguments).steps]

    assert train(2) == train(1000)


def test_metrics_are_averaged_over_the_evaluation():
    inputs, labels = samples(10)
    model = classifier()
    trainer = Trainer(
        model,
        config(),
        val_loader=[(inputs[:3], labels[:3]), (inputs[3:], labels[3:])],
        metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float().mean()},
    )
    expected = (model(inputs).argmax(1) == labels).float().mean().item()
    assert trainer.validate()["accuracy"] == pytest.approx(expected)


def test_no_metric_may_have_a_name_that_evaluations_have_anyway():
    tokens = {
        "input_ids": torch.zeros(2, 3, dtype=torch.int64),
        "labels": torch.ones(2, 3, dtype=torch.int64),
    }

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Embedding(2, 2)

        def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.net(input_ids).flatten(0, 1), labels.flatten())

    class Bytes(list):
        def bytes_of(self, batch: dict) -> int:
            return 6

    records = fit(Model(), config(steps=1), train_loader=[tokens], val_loader=Bytes([tokens]))
    assert set(records.evaluations[0]) == set(MEASURED)


def test_evaluations_open_the_run_recur_and_close_it():
    records = fit(
        classifier(), config(steps=7, evaluate_every=3), train_loader=[samples(4)], val_loader=[samples(4)]
    )
    assert [record["step"] for record in records.evaluations] == [0, 3, 6, 7]


def test_evaluate_batches_limits_an_evaluation():
    seen = []
    batches = [samples(2, seed) for seed in range(5)]
    trainer = Trainer(
        classifier(),
        config(evaluate_batches=2),
        val_loader=batches,
        metrics={"seen": lambda output, target: seen.append(1) or output.sum()},
    )
    trainer.validate()
    assert len(seen) == 2


def test_callbacks_run_in_order_and_their_requests_are_granted(tmp_path):
    told: list[str] = []

    class Told(Callback):
        def __init__(self, name: str):
            self.name = name

        def on_fit_start(self, trainer):
            told.append(f"{self.name} start")

        def on_step_end(self, trainer):
            told.append(f"{self.name} step {trainer.step}")
            trainer.control.save = trainer.step == 2
            trainer.control.evaluate = trainer.step == 1
            trainer.control.stop = trainer.step == 3

        def on_log(self, trainer, records):
            told.append(f"{self.name} log {[record['step'] for record in records]}")

        def on_evaluate(self, trainer, result):
            told.append(f"{self.name} evaluate {result['step']}")

        def on_save(self, trainer, checkpoint):
            told.append(f"{self.name} save {checkpoint.name}")

        def on_fit_end(self, trainer):
            told.append(f"{self.name} end")

    cfg = config(steps=9, run_dir=str(tmp_path), checkpoint=CheckpointConfig(background=False))
    trainer = Trainer(
        classifier(),
        cfg,
        train_loader=[samples(4)],
        val_loader=[samples(4)],
        callbacks=[Told("a"), Told("b")],
    )
    trainer.fit()
    assert [line[2:] for line in told if line.startswith("a")] == [
        *("start", "evaluate 0", "step 1", "log [1]", "evaluate 1"),
        *("step 2", "log [2]", "save step-2"),
        *("step 3", "log [3]", "evaluate 3", "save step-3", "end"),
    ]
    assert told[::2] == [line.replace("b", "a", 1) for line in told[1::2]]


def test_the_state_of_a_callback_is_in_the_checkpoint(tmp_path):
    class Counter(Callback):
        count = 0

        def on_step_end(self, trainer):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    for steps, counter in ((2, Counter()), (5, Counter())):
        cfg = config(steps=steps, run_dir=str(tmp_path))
        Trainer(classifier(), cfg, train_loader=[samples(4)], callbacks=[counter]).fit()
        assert counter.count == steps


def test_common_settings_are_words_of_the_trainer_and_win_over_the_configuration(tmp_path):
    words = {"steps": 2, "device": "cpu", "run_dir": tmp_path, "learning_rate": 0.5, "warmup_steps": 1}
    trainer = Trainer(classifier(), train_loader=[samples(4)], **words)
    optim, schedule = OptimConfig(learning_rate=0.5), ScheduleConfig(warmup_steps=1)
    short = RunConfig(0, "cpu", tmp_path, TrainerConfig(steps=2), optim, schedule)
    assert trainer.cfg == short
    trainer.fit()
    assert trainer.step == 2
    nested = RunConfig(seed=3, optim=OptimConfig(name="sgd", momentum=0.5))
    cfg = Trainer(classifier(), nested, device="cpu", learning_rate=0.2, steps=7).cfg
    assert cfg.optim == OptimConfig(name="sgd", momentum=0.5, learning_rate=0.2)
    assert (cfg.seed, cfg.trainer.steps) == (3, 7)
    by_tokens = RunConfig(device="cpu", trainer=TrainerConfig(duration="2 epochs"))
    assert Trainer(classifier(), by_tokens, steps=7).cfg.trainer == TrainerConfig(steps=7)
    with pytest.raises(UserError, match=r"^Trainer: duration=1h: expected nothing beside steps=3$"):
        Trainer(classifier(), steps=3, duration="1h")
    with pytest.raises(UserError, match=r"^Trainer: stepz: no such argument; .*; did you mean steps\?$"):
        Trainer(classifier(), stepz=3)
    with pytest.raises(UserError, match=r"^trainer\.steps=2\.5: expected a whole number, 1 or more$"):
        Trainer(classifier(), steps=2.5)


def test_settings_that_do_nothing_beside_what_is_given_are_named(capsys):
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cfg = RunConfig(device="cpu", optim=OptimConfig(learning_rate=0.5, freeze=["0.*"]))
    Trainer(model, cfg, optimizer=optimizer, warmup_steps=3)
    said = capsys.readouterr().out
    assert "note: optim.learning_rate: not used, the Trainer was given an optimizer\n" in said
    assert "note: schedule.warmup_steps: not used, the Trainer was given an optimizer\n" in said
    Trainer(classifier(), cfg, lr_scheduler=lambda step: 0.1, warmup_steps=3)
    said = capsys.readouterr().out
    unused = "schedule.warmup_steps, optim.learning_rate"
    assert f"note: {unused}: not used, the Trainer was given an lr_scheduler\n" in said
    Trainer(classifier(), RunConfig(device="cpu"), lr_scheduler=lambda step: 0.1)
    assert "not used" not in capsys.readouterr().out


def test_an_lr_scheduler_may_be_a_function_of_the_step():
    records = fit(
        classifier(), config(steps=3), train_loader=[samples(4)], lr_scheduler=lambda step: 0.1 / (step + 1)
    )
    assert [record["learning_rate"] for record in records.steps] == [0.1, 0.05, 0.1 / 3]


def test_a_given_optimizer_keeps_its_own_learning_rate():
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    records = fit(model, config(steps=3), train_loader=[samples(4)], optimizer=optimizer)
    assert {record["learning_rate"] for record in records.steps} == {0.3}


def test_nothing_is_written_without_a_run_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(classifier(), config(), train_loader=[samples(4)])
    trainer.fit()
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no run_dir was given"):
        trainer.save()


def ignored(count: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(count, 4), torch.full((count,), -100)


class OfAnotherLibrary(Callback):
    def on_evaluation_end(self, trainer, module):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train_loader": None}, "fit: the Trainer was given no train_loader"),
        ({"train_loader": 3}, "train_loader is a int: expected an iterable"),
        ({"train_loader": []}, "train_loader gave no batch"),
        (
            {"train_loader": [samples(3)[0]]},
            "no loss: the model returned a tensor of shape .3, 3. and the batch has no",
        ),
        (
            {"train_loader": [samples(3)[0]], "loss_fn": F.mse_loss},
            "the batch has no target: expected .*; without a target have the model's forward return the loss "
            "and give no loss_fn, or give step= a TrainStep with a forward of its own",
        ),
        ({"train_loader": [("a", "b")]}, "a batch of type tuple holds no tensor"),
        ({"train_loader": [1, 2, 3]}, "a batch of type int holds no tensor"),
        ({"train_loader": [ignored(2)]}, "step 1: the batch has nothing to learn from .every label is -100"),
        (
            {"model": nn.Linear(4, 1), "train_loader": [(torch.zeros(3, 4), torch.ones(3, 1))]},
            r"the targets are torch.float32 of shape \(3, 1\) for an output of shape \(3, 1\): "
            "cross-entropy, the default loss, takes them for class probabilities, and there is one class; ",
        ),
        (
            {"train_loader": [(samples(3)[0], torch.ones(3, 3))]},
            "takes them for class probabilities, and they are negative or do not sum to 1; give",
        ),
        (
            {"train_loader": [(samples(3)[0], torch.tensor([[2.0, -1.0, 0.0]] * 3))]},
            "takes them for class probabilities, and they are negative or do not sum to 1; give",
        ),
        (
            {"train_loader": [(samples(3)[0], torch.ones(3))]},
            r"of shape \(3,\) for an output of shape \(3, 3\): .*, needs class indices .int64.",
        ),
        ({"train_loader": [samples(0)]}, r"step 1: the batch has nothing to learn from \(it has no sample\)"),
        (
            {"train_loader": [samples(3), samples(0)]},
            r"step 2: the batch has nothing to learn from \(it has no sample\)",
        ),
        (
            {"model": classifier().requires_grad_(False)},
            "no parameter to train: all have requires_grad=False, such as 0.weight; call requires_grad_",
        ),
        (
            {
                "model": classifier().requires_grad_(False),
                "cfg": config(optim=OptimConfig(freeze=["0.*"])),
            },
            "to train: those that optim.freeze leaves have requires_grad=False, such as 2.weight; call",
        ),
        (
            {"cfg": config(optim=OptimConfig(freeze=["*"]))},
            r"the model has no parameter to train: all are frozen \(optim.freeze\)",
        ),
        ({"train_loader": [samples(3)], "val_loader": []}, "val_loader gave no batch"),
        (
            {"train_loader": [samples(3)], "loss_fn": lambda output, target: output},
            "loss_fn returned a tensor of shape .3, 3.: expected a scalar",
        ),
        (
            {
                "train_loader": [samples(3)],
                "optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0),
            },
            "the optimizer holds a tensor that is no parameter of the model on cpu",
        ),
        (
            {"model": nn.Linear},
            "Trainer: model is the class Linear, not an object of it: expected a torch.nn.M",
        ),
        (
            {"model": torch.compile(nn.Linear(4, 2))},
            "Trainer: model is a OptimizedModule: expected the module that was given to torch.compile",
        ),
        ({"model": lambda x: x}, "Trainer: model is a function: expected a torch.nn.Module"),
        ({"model": nn.ReLU()}, "the model has no parameter to train: it has none at all"),
        ({"cfg": {"steps": 3}}, r"Trainer: cfg is a dict: expected a RunConfig, such as RunConfig\("),
        ({"cfg": TrainerConfig()}, "Trainer: cfg is a TrainerConfig: expected a RunConfig"),
        ({"loss_fn": "mse"}, "Trainer: loss_fn is 'mse': expected a function of .output, target."),
        ({"loss_fn": nn.MSELoss}, "Trainer: loss_fn is the class MSELoss, not an object of it: expected"),
        ({"optimizer": torch.optim.SGD}, "Trainer: optimizer is the class SGD, not an object of it"),
        (
            {"lr_scheduler": "cosine"},
            r"Trainer: lr_scheduler is 'cosine': expected a function .*ScheduleConfig\(name='cosine'\)",
        ),
        ({"lr_scheduler": ScheduleConfig}, "Trainer: lr_scheduler is the class ScheduleConfig, not an obj"),
        (
            {
                "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                    torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
                )
            },
            "Trainer: lr_scheduler is a ReduceLROnPlateau: expected a scheduler that needs no metric",
        ),
        ({"metrics": ["accuracy"]}, "Trainer: metrics is a list: expected a mapping of names to functions"),
        ({"metrics": {"accuracy": 3}}, r"Trainer: metrics\['accuracy'\] is 3: expected a function"),
        (
            {"metrics": {"loss": F.l1_loss}},
            "Trainer: metrics has 'loss': evaluations have a number of that name, expected another name, "
            "such as 'my_loss'",
        ),
        (
            {"metrics": {"accuracy": F.l1_loss}, "cfg": config(metrics=["accuracy"])},
            "Trainer: metrics has 'accuracy': evaluations have a number of that name",
        ),
        (
            {"metrics": {"a/loss": F.l1_loss}},
            "metrics has 'a/loss': names are text without '/', .*'my_a_loss'",
        ),
        ({"callbacks": Callback()}, "Trainer: callbacks is a Callback: expected a list of tputrain.Callback"),
        ({"callbacks": [Callback]}, r"Trainer: callbacks\[0\] is the class Callback, not an object of it"),
        (
            {"callbacks": ["early_stopping"]},
            r"Trainer: callbacks\[0\] is 'early_stopping': expected a tputrain.C",
        ),
        (
            {"callbacks": [OfAnotherLibrary()]},
            "OfAnotherLibrary: nothing calls its on_evaluation_end: expected one",
        ),
        ({"loggers": ["tensorboard"]}, r"Trainer: loggers\[0\] is 'tensorboard': expected a tputrain.Logger"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_was_expected(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        Trainer(**{"model": classifier(), "cfg": config(), **arguments}).fit()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainerConfig(steps="10"), "trainer.steps='10': expected a whole number, 1 or more"),
        (lambda: TrainerConfig(accumulate=2.0), "trainer.accumulate=2.0: expected a whole number, 1 or"),
        (lambda: TrainerConfig(accumulate=True), "trainer.accumulate=true: expected a whole number, 1 or"),
        (lambda: CheckpointConfig(keep_last=2.0), "checkpoint.keep_last=2.0: expected a whole number"),
        (
            lambda: RunConfig(checkpoint=CheckpointConfig(background="no")),
            "checkpoint.background='no': expected true or false",
        ),
        (lambda: RunConfig(seed="0"), "seed='0': expected a whole number"),
        (lambda: TrainerConfig(steps=np.int64(2)), "trainer.steps=np.int64(2): expected a whole number, 1"),
        (lambda: TrainerConfig(max_grad_norm="1"), "trainer.max_grad_norm=1: expected a number above 0"),
        (
            lambda: RunConfig(trainer={"steps": 3}),
            "trainer={'steps': 3}: expected a TrainerConfig, such as Tra",
        ),
        (lambda: RunConfig(optim=None), "optim=null: expected a OptimConfig, such as OptimConfig()"),
    ],
)
def test_a_setting_of_another_kind_is_refused_where_it_is_made(make, message):
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value).startswith(message)


def test_a_run_directory_may_be_a_path(tmp_path):
    assert RunConfig(run_dir=tmp_path) == RunConfig(run_dir=str(tmp_path))


def test_a_generator_that_ends_early_is_told_with_what_it_gave():
    generator = (samples(4) for _ in range(2))
    with pytest.raises(UserError, match="train_loader is a generator that ended after 2 batches and cannot"):
        Trainer(classifier(), config(steps=3), train_loader=generator).fit()


def test_a_long_evaluation_says_how_far_it_is(monkeypatch, capsys):
    from tputrain.loop import evaluator

    monkeypatch.setattr(evaluator, "_SECONDS_BETWEEN_NEWS", 0.0)
    trainer = Trainer(classifier(), config(evaluate_batches=2), val_loader=[samples(4)] * 3)
    trainer.validate()
    assert "evaluating: 1 of 2 batches done" in capsys.readouterr().out


def test_a_resume_names_the_settings_that_changed(tmp_path, capsys):
    for steps, every in ((2, 100), (3, 50)):
        cfg = config(steps=steps, evaluate_every=every, run_dir=str(tmp_path))
        Trainer(classifier(), cfg, train_loader=[samples(4)]).fit()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert said == [
        "note: trainer.steps is 3 from here on, it was 2",
        "note: trainer.evaluate_every is 50 from here on, it was 100",
    ]


def test_a_loss_that_is_not_a_number_is_logged_as_json(tmp_path):
    from tputrain.loggers.jsonl import read_jsonl

    batch = (torch.full((2, 4), float("nan")), torch.tensor([0, 1]))
    cfg = config(steps=1, run_dir=str(tmp_path), on_nonfinite="continue")
    Trainer(classifier(), cfg, train_loader=[batch]).fit()
    (record,) = read_jsonl(tmp_path / "metrics.jsonl")
    assert (record["loss"], record["loss_hex"]) == (None, "nan")


class PoisonedFrom:
    """Batches that are good until `step`, and then hold an infinity or a NaN."""

    def __init__(self, step: int, poison: float):
        self.step, self.poison = step, poison

    def batch_at(self, step: int, micro: int):
        inputs, labels = samples(4)
        if step + 1 >= self.step:
            inputs[0, 0] = self.poison
        return inputs, labels


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("every", [1, 3, 50])
def test_a_run_that_diverges_stops_and_its_good_checkpoints_stay(tmp_path, poison, every):
    cfg = config(
        steps=50, run_dir=str(tmp_path), checkpoint=CheckpointConfig(every=4), log=LogConfig(every, "none")
    )
    with pytest.raises(UserError, match=r"step 10: loss is (nan|inf); the run stops") as caught:
        Trainer(classifier(), cfg, train_loader=PoisonedFrom(10, poison)).fit()
    assert "\n" not in str(caught.value)
    assert "run again, it goes on from the newest checkpoint; " in str(caught.value)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-4", "step-8"]
    trainer = Trainer(classifier(), cfg, train_loader=PoisonedFrom(99, 0.0))
    trainer.fit()
    assert trainer.step == 50


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_run_that_diverges_before_its_first_checkpoint_says_that_it_begins_anew(tmp_path, policy):
    cfg = config(steps=30, run_dir=str(tmp_path), checkpoint=CheckpointConfig(every=50), on_nonfinite=policy)
    with pytest.raises(UserError, match="run again, there is no checkpoint yet, so it begins anew"):
        Trainer(classifier(), cfg, train_loader=PoisonedFrom(2, math.nan)).fit()


def test_gradients_and_evaluations_that_are_no_numbers_stop_a_run_too():
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, values):
            return (self.weight * values.sum()).abs().sqrt()  # its value at 0 is 0, its slope there is not

    with pytest.raises(UserError, match=r"step 1: grad_norm is (nan|inf)"):
        fit(Root(), config(), train_loader=[torch.ones(2)])
    bad = torch.full((2, 4), math.nan), torch.tensor([0, 1])
    with pytest.raises(UserError, match="step 0: loss is nan"):
        fit(classifier(), config(), train_loader=[samples(4)], val_loader=[bad])


def test_a_trainer_that_was_interrupted_or_stopped_can_be_used_again():
    class Ends(Callback):
        def on_step_end(self, trainer):
            if trainer.step == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            trainer.control.stop = trainer.step == 2

    cfg = config(steps=3)
    trainer = Trainer(
        classifier(), cfg, train_loader=[samples(4)], val_loader=[samples(4)], callbacks=[Ends()]
    )
    with pytest.raises(Interrupted):
        trainer.fit()
    assert trainer.step == 1
    assert trainer.validate()["loss"] > 0
    trainer.fit()
    assert trainer.step == 2
    trainer.fit()
    assert trainer.step == 3


def test_what_the_caller_took_from_the_garbage_collector_stays_taken():
    import gc

    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        fit(classifier(), config(), train_loader=[samples(4)])
        assert gc.get_freeze_count() == pytest.approx(frozen, abs=100)  # some of it may be gone by now
    finally:
        gc.unfreeze()
        gc.freeze()  # see tests/conftest.py


def test_the_garbage_collector_is_back_to_normal_after_a_run():
    import gc

    gc.unfreeze()  # see tests/conftest.py
    gc.collect()
    frozen_by_python = gc.get_freeze_count()
    try:
        fit(classifier(), config(), train_loader=[samples(4)])
        gc.collect()
        assert gc.isenabled()
        assert gc.get_freeze_count() == frozen_by_python
    finally:
        gc.freeze()
