"""From a recipe's configuration to the objects it names."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tputrain.announce import announced, say
from tputrain.callbacks.sample_text import SampleText
from tputrain.checkpoint import contents
from tputrain.data import (
    StreamedText,
    TextData,
    Tokenizer,
    ValidationBatches,
    build_data,
    build_stream,
    check_vocabulary,
    load_tokenizer,
)
from tputrain.device import find_device
from tputrain.models import add_lora, build_initialized
from tputrain.recipe import RecipeConfig
from tputrain.trainer import Trainer


@dataclass(frozen=True)
class Job:
    """A trainer ready to fit, and what there is to say about it beforehand."""

    trainer: Trainer
    description: list[str]


def build_job(cfg: RecipeConfig, checkpoint: Path | None = None) -> Job:
    """Data, model and Trainer of a recipe. The model has its initial values.

    `checkpoint`: what the run goes on from, whose tokenizer is used and whose data is asked for.
    """
    find_device(cfg.device)  # a device that is not there is reported before the tokenizer is trained
    tokenizer, fingerprint = (None, None) if checkpoint is None else _started_with(checkpoint)
    data = _build_data(cfg, tokenizer, fingerprint)
    with announced(f"building {cfg.model.name} and its optimizer"):
        trainer = _build_trainer(cfg, data)
    num_parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    description = [
        *data.describe(),
        f"model: {cfg.model.name}, {num_parameters:,} parameters",
        cfg.batch.arithmetic(cfg.data.sequence_length),
        f"run: {cfg.trainer.steps} steps, {cfg.trainer.steps * cfg.batch.tokens:,} tokens, in {cfg.run_dir}",
    ]
    return Job(trainer, description)


def build_evaluation(cfg: RecipeConfig, checkpoint: Path) -> Trainer:
    """A Trainer that can only evaluate: the text that `cfg` names, with the tokenizer of `checkpoint`."""
    find_device(cfg.device)
    tokenizer, fingerprint = _started_with(checkpoint)
    data = _build_data(cfg, tokenizer, None)
    if fingerprint is not None and data.fingerprint != fingerprint:
        say(f"note: {data.title} is not the text that the run was started with; it may have been trained on")
    with announced(f"building {cfg.model.name}"):
        return Trainer(_build_model(cfg), cfg, val_loader=_validation_batches(cfg, data))


def _build_data(
    cfg: RecipeConfig, tokenizer: Tokenizer | None, expected: str | None
) -> TextData | StreamedText:
    build = build_stream if cfg.data.streaming else build_data
    return build(cfg.data, cfg.seed, announce=say, tokenizer=tokenizer, expected=expected)


def _started_with(checkpoint: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer of a run, and the fingerprint of its data (None in a checkpoint that does not say it)."""
    data = contents.load_state(checkpoint)["data"] or {}
    return load_tokenizer(checkpoint), data.get("fingerprint")


def _validation_batches(cfg: RecipeConfig, data: TextData | StreamedText) -> ValidationBatches:
    return ValidationBatches(data.validation, cfg.batch.sequences, data.tokenizer.token_bytes())


def _build_model(cfg: RecipeConfig) -> nn.Module:
    """The model of a recipe in its initial values."""
    model = build_initialized(cfg.model, cfg.seed)
    if cfg.lora.rank > 0:
        add_lora(model, cfg.lora, cfg.seed)
    return model


def _build_trainer(cfg: RecipeConfig, data: TextData | StreamedText) -> Trainer:
    vocab_size = cfg.model.limits()[1]
    if vocab_size is not None:
        check_vocabulary(data.tokenizer, vocab_size)
    model = _build_model(cfg)
    callbacks = []
    if cfg.sample.max_new_tokens > 0:
        callbacks.append(SampleText(data.tokenizer, cfg.sample, cfg.data.sequence_length))
    return Trainer(
        model,
        cfg,
        train_loader=data.training_batches(cfg.batch.sequences, cfg.trainer.accumulate),
        val_loader=_validation_batches(cfg, data),
        callbacks=callbacks,
        tokenizer=data.tokenizer,
    )


def build_trained_model(cfg: RecipeConfig, checkpoint: Path) -> tuple[nn.Module, Tokenizer, torch.device]:
    """Model and tokenizer from a checkpoint alone, on their device: no data is needed."""
    device = find_device(cfg.device)
    model = build_initialized(replace(cfg.model, init="random"), cfg.seed)
    contents.load_model(model, checkpoint)
    return model.to(device), load_tokenizer(checkpoint), device
