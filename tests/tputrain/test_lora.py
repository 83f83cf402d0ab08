"""LoRA: what is trained, what a checkpoint holds, and that others can use it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

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
from tputrain.models import Llama, LlamaConfig, LoraConfig, add_lora, initialize, merge_lora, save_adapter
from tputrain.models.meta import allocate, parameters_on_meta

SMALL = LlamaConfig(
    vocab_size=60,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    tie_word_embeddings=False,
)
QUERIES = LoraConfig(rank=2, alpha=8.0, match=["*.q_proj", "*.down_proj"])


class Batches:
    def batch_at(self, step: int, micro: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(60, (2, 9), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}


def small(lora: LoraConfig | None = QUERIES) -> Llama:
    initialize(model := Llama(SMALL), seed=3)
    if lora is not None:
        add_lora(model, lora, seed=3)
    return model


def train(model: nn.Module, device: str, steps: int, run_dir=None, **optim) -> Trainer:
    cfg = RunConfig(
        device=device,
        run_dir=None if run_dir is None else str(run_dir),
        trainer=TrainerConfig(steps=steps),
        optim=OptimConfig(learning_rate=0.05, **optim),
        schedule=ScheduleConfig(name="constant"),
        checkpoint=CheckpointConfig(every=None),
        log=LogConfig(every=100, progress="none"),
    )
    trainer = Trainer(model, cfg, train_loader=Batches())
    trainer.fit()
    return trainer


def logits(model: nn.Module) -> torch.Tensor:
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(Batches().batch_at(99, 0)["input_ids"].to(device)).cpu()


def test_it_begins_as_the_plain_model_and_trains_only_the_products():
    model, plain = small(), small(lora=None)
    assert torch.equal(logits(model), logits(plain))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {
        f"model.layers.{layer}.{name}.lora_{letter}"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "mlp.down_proj")
        for letter in "ab"
    }
    train(model, "cpu", 2)
    assert not torch.equal(logits(model), logits(plain))
    for name, parameter in plain.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


def test_initial_values_depend_on_seed_and_name_alone():
    same, other = small(), Llama(SMALL)
    add_lora(other, QUERIES, seed=3)
    where = "model.layers.1.mlp.down_proj.lora_a"
    assert torch.equal(same.get_parameter(where), other.get_parameter(where))
    assert not torch.equal(
        same.get_parameter(where), same.get_parameter("model.layers.0.mlp.down_proj.lora_a")
    )


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("optim", [{}, {"ema_decay": 0.5}], ids=["plain", "ema"])
def test_a_checkpoint_is_the_merged_model_and_resumes_to_the_last_bit(device, optim, tmp_path):
    whole = train(small(), device, 4, tmp_path / "whole", **optim)
    train(small(), device, 2, tmp_path / "parts", **optim)
    parts = train(small(), device, 4, tmp_path / "parts", **optim)
    for (name, ours), theirs in zip(parts.model.named_parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs), name

    merged = small(lora=None)
    merged.load_state_dict(load_file(tmp_path / "whole" / "checkpoints" / "step-4" / "model.safetensors"))
    with whole.evaluation_weights.in_place():
        torch.testing.assert_close(logits(merged), logits(whole.model), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("ema", [None, 0.5], ids=["plain", "ema"])
def test_products_of_another_rank_are_refused_in_one_line(ema, tmp_path):
    # Of rank 1, and without an optimizer's state: each product can be broadcast to any rank.
    one, four = (LoraConfig(rank=rank, match=["*.q_proj"]) for rank in (1, 4))
    sgd = {"name": "sgd", "momentum": 0.0, "ema_decay": ema}
    train(small(one), "cpu", 2, tmp_path, **sgd)
    with pytest.raises(
        UserError, match=r"lora_[ab]\S* has shape \(.*\), the model's has \(.*4.*\)$"
    ) as caught:
        train(small(four), "cpu", 4, tmp_path, **sgd)
    assert "step-2/trained.safetensors: model.layers.0.self_attn.q_proj.lora_" in str(caught.value)


def test_merging_gives_plain_layers_that_compute_the_same():
    model = small()
    train(model, "cpu", 3)
    before = logits(model)
    merge_lora(model)
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in small(lora=None).named_parameters()
    }
    torch.testing.assert_close(logits(model), before, atol=1e-5, rtol=1e-4)


def test_an_adapter_says_in_pefts_words_what_was_trained(tmp_path):
    model = small()
    save_adapter(model, "base/directory", tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(saved[f"base_model.model.{name}.lora_A.weight"], model.get_parameter(f"{name}.lora_a"))
    assert len(saved) == 8
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (
        2,
        8.0,
        "base/directory",
    )
    assert name in config["target_modules"]


def test_a_model_without_memory_gets_the_same_values_later():
    with parameters_on_meta():
        add_lora(model := Llama(SMALL), QUERIES, seed=3)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=3)
    expected = dict(small().named_parameters())
    assert {name for name, _ in model.named_parameters()} == expected.keys()
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())
    assert any(parameter.any() for name, parameter in model.named_parameters() if name.endswith("lora_a"))


def test_mistakes_are_one_line():
    with pytest.raises(UserError, match=r"^lora\.match=\*\.qproj: expected a pattern of names in the model"):
        small(LoraConfig(rank=2, match=["*.qproj"]))
    with pytest.raises(UserError, match=r"^model=Llama: expected a model with LoRA layers"):
        save_adapter(small(lora=None), "x", ".")
    tied = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    tied["b"].weight = tied["a"].weight
    with pytest.raises(UserError, match=r"^lora\.match=a: expected a layer whose weight is not tied"):
        add_lora(tied, LoraConfig(rank=1, match=["a"]), seed=0)
