"""From a recipe's configuration to the objects it names."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tputrain.announce import announced, say
from tputrain.callbacks.sample_text import SampleText
from tputrain.checkpoint.named_directory import model_directory
from tputrain.data import Data, Tokenizer, check_vocabulary, load_tokenizer
from tputrain.data.config import TextConfig
from tputrain.device import find_device, open_device, use_executable_cache
from tputrain.errors import UserError
from tputrain.job_notes import notes
from tputrain.lr_finder import Sweep, find_learning_rate
from tputrain.lr_sweep import SweepConfig
from tputrain.models import add_lora, initialize, parameters_on_meta
from tputrain.models.hf_llama import load_weights
from tputrain.models.lora import initialize_lora
from tputrain.parallel.cluster import hosts
from tputrain.parallel.config import ParallelConfig
from tputrain.parallel.slices import check_length
from tputrain.parallel.tensor_plan import matched_rules
from tputrain.parallel.world import World, join
from tputrain.recipe import RecipeConfig, read_recipe
from tputrain.resume import started_from
from tputrain.sampling import why_silent
from tputrain.shipped import default_run_dir, find_recipe
from tputrain.snapshot import contents
from tputrain.trainer import Trainer

Initialize = Callable[[Any], None]


@dataclass(frozen=True)
class Recipe:
    """The checked configuration of a recipe, and what is built of it."""

    cfg: RecipeConfig

    def build(self) -> Trainer:
        """Data, model and Trainer; the run in `cfg.run_dir` goes on, if there is one and resume is auto.

        Says on the way what takes long and what was built. Raises UserError, one line, for what its caller
        can mend, also where the run there is another one.
        """
        world = join(self.cfg.parallel, find_device(self.cfg.device))
        goes_on = self.cfg.checkpoint.resume == "auto"
        return self.build_from(world.first(lambda: started_from(self.cfg)) if goes_on else None)

    def build_from(self, checkpoint: Path | None) -> Trainer:
        """Data, model and Trainer. The model has its initial values.

        `checkpoint`: the checkpoint to resume; its tokenizer is used, and the data must match its
        fingerprint.
        """
        cfg = self.cfg
        device = _device(cfg)  # a device that is not there is reported before the tokenizer is trained
        world = join(cfg.parallel, device)
        cfg.batch.check_divides(world.data_size)
        tokenizer, fingerprint = (None, None) if checkpoint is None else _started_with(cfg, checkpoint)
        if checkpoint is None:
            _check_model_path(cfg)
        data = _build_data(cfg, tokenizer, fingerprint)  # one process of a host makes what is not there yet
        world.meet("reading the data")
        with announced(f"building {cfg.model.described} and its optimizer"):
            trainer = _build_trainer(cfg, data, checkpoint, world)
        for line in (
            *data.describe(),
            *(notes(cfg, data) if checkpoint is None else []),
            f"model: {cfg.model.described}, {_counted(trainer.model)}",
            cfg.batch.arithmetic(cfg.data.sequence_length),
            f"run: {_how_much(cfg)}, in {cfg.run_dir}",
        ):
            say(line)
        return trainer


def _counted(model: nn.Module) -> str:
    """How many parameters it has, and how many of them are trained where that is not all."""
    trained = [parameter.requires_grad for parameter in model.parameters()]
    sizes = [parameter.numel() for parameter in model.parameters()]
    text = f"{sum(sizes):,} parameters"
    return text if all(trained) else f"{text}, {sum(compress(sizes, trained)):,} of them trained"


def load_recipe(recipe: str | Path, *overrides: str) -> Recipe:
    """The recipe of that name, or in that file, with `key=value` overrides on top.

    `load_recipe("llama", "trainer.steps=20").build().fit()` is `tputrain run llama trainer.steps=20`. Without
    `run_dir` the run is in runs/RECIPE. Raises UserError, one line, for a mistake in it.
    """
    path = find_recipe(str(recipe))
    cfg = read_recipe(path, overrides)
    return Recipe(cfg if cfg.run_dir is not None else replace(cfg, run_dir=str(default_run_dir(path))))


def check_before_ranks(cfg: RecipeConfig, checkpoint: Path | None) -> None:
    """Raise UserError for some of what ranks would find only once they have started: text files that are not
    there, layers or sequences that do not divide.

    `checkpoint`: what the run goes on from. On several hosts nothing is looked at: their ranks find out
    together.
    """
    if hosts().size > 1:
        return
    check_files(cfg, checkpoint)
    if cfg.parallel.auto:
        return
    degrees = cfg.parallel.resolved(cfg.parallel.processes)
    for length in cfg.data.lengths:
        check_length(length, degrees["context"])
    if degrees["tensor"] > 1 and not cfg.model.is_built_whole(goes_on=checkpoint is not None):
        with parameters_on_meta():
            model = cfg.model.build_empty(cfg.seed) if checkpoint is None else _build_shape(cfg, checkpoint)
        matched_rules(model, cfg.parallel.plan, degrees["tensor"])


def check_files(cfg: RecipeConfig, checkpoint: Path | None = None) -> None:
    """Raise UserError where text files are not there, or the model that a run without `checkpoint` begins
    with.
    """
    if checkpoint is None:
        _check_model_path(cfg)
    if isinstance(cfg.data, TextConfig):
        cfg.data.files_behind()


def build_evaluation(cfg: RecipeConfig, checkpoint: Path) -> Trainer:
    """A Trainer that can only evaluate: the text that `cfg` names, with the tokenizer of `checkpoint`.

    In one process, however many the run has.
    """
    cfg = replace(cfg, parallel=ParallelConfig())
    _device(cfg)
    tokenizer, fingerprint = _started_with(cfg, checkpoint)
    data = _build_data(cfg, tokenizer, None)
    if fingerprint is not None and data.fingerprint != fingerprint:
        say(f"note: {data.title} is not the text that the run was started with; it may have been trained on")
    with announced(f"building {cfg.model.described}"):
        return Trainer(_build_model(cfg, checkpoint), cfg, val_loader=data.evaluation_batches(cfg.batch.size))


def _device(cfg: RecipeConfig) -> torch.device:
    """The device of a recipe, open; from now on it keeps its compiled programs for the next command."""
    device = find_device(cfg.device)
    use_executable_cache(device, cfg.execution.executable_cache)
    join(cfg.parallel, device)
    open_device(device)
    return device


def _how_much(cfg: RecipeConfig) -> str:
    samples = cfg.batch.samples
    if cfg.trainer.duration is not None:
        return cfg.trainer.duration
    num_done = cfg.trainer.steps * (samples or cfg.batch.tokens)
    return f"{cfg.trainer.steps} steps, {num_done:,} {'images' if samples else 'tokens'}"


def _build_data(cfg: RecipeConfig, tokenizer: Tokenizer | None, expected: str | None) -> Data:
    return cfg.data.build(cfg.seed, say, tokenizer, expected)


def _started_with(cfg: RecipeConfig, checkpoint: Path) -> tuple[Tokenizer | None, str | None]:
    """The tokenizer of a run (None: it reads no text), and the fingerprint of its data (None in a checkpoint
    that does not say it).
    """
    data = contents.load_state(checkpoint)["data"] or {}
    return load_tokenizer(checkpoint) if cfg.data.is_text else None, data.get("fingerprint")


def _build_model(cfg: RecipeConfig, checkpoint: Path | None) -> nn.Module:
    """The model of a recipe: in its initial values, or in any where a `checkpoint` is loaded into it."""
    if checkpoint is not None:
        model = _build_shape(cfg, checkpoint)
    else:
        model = cfg.model.build(cfg.seed)
        if (give_values := _begin_from(cfg)) is not None:
            give_values(model)
    if cfg.lora.rank > 0:
        add_lora(model, cfg.lora, cfg.seed)
    return model


def _build_divisible(cfg: RecipeConfig, checkpoint: Path | None) -> tuple[nn.Module, Initialize | None]:
    """The model of a recipe for one of several ranks, and what gives it values once it is divided.

    Models of transformers that begin anew, and those that the user's code makes, have their values at once.
    """
    if cfg.model.is_built_whole(goes_on=checkpoint is not None):
        return _build_model(cfg, checkpoint), None
    with parameters_on_meta():
        model = cfg.model.build_empty(cfg.seed) if checkpoint is None else _build_shape(cfg, checkpoint)
        if cfg.lora.rank > 0:
            add_lora(model, cfg.lora, cfg.seed)
    if checkpoint is not None:
        return model, partial(contents.load_model, directory=checkpoint)
    return model, _begin_from(cfg) or partial(initialize, seed=cfg.seed)


def _build_shape(cfg: RecipeConfig, checkpoint: Path) -> nn.Module:
    """A model for the weights of `checkpoint`."""
    built = cfg.model.build_for(checkpoint, cfg.seed)
    if cfg.model.is_transformers and "padding" in (state := contents.load_state(checkpoint)):
        # config.json there names the tokenizer's padding token: the gradients must not change by that.
        built.get_input_embeddings().padding_idx = state["padding"]  # type: ignore[operator]
    return built


def _check_model_path(cfg: RecipeConfig) -> None:
    """Before the data is read: what a run begins with must be there, and large enough."""
    path = cfg.model.local_path
    if path is not None and not Path(path).expanduser().is_dir():
        raise UserError(
            f"model.path={path}: no such directory; expected one with *.safetensors, or a run "
            "(`tputrain run llama` makes one in runs/llama)"
        )
    cfg.check_limits(*cfg.model.limits_there())


def _begin_from(cfg: RecipeConfig) -> Initialize | None:
    """What gives our Llama the weights that the recipe says it begins with."""
    path = cfg.model.weights_path
    return None if path is None else partial(_load_llama, path=path, seed=cfg.seed)


def _load_llama(model: nn.Module, path: str, seed: int) -> None:
    directory = model_directory(path)
    assert directory is not None, "_check_model_path has looked"
    load_weights(model, directory)
    initialize_lora(model, seed)


def _build_trainer(cfg: RecipeConfig, data: Data, checkpoint: Path | None, world: World) -> Trainer:
    tokenizer = data.tokenizer
    vocab_size = (cfg.model.limits_there() if checkpoint is None else cfg.model.limits())[1]
    if tokenizer is not None and vocab_size is not None:
        check_vocabulary(tokenizer, vocab_size)
    give_values: Initialize | None = None
    if world.size == 1:
        model = _build_model(cfg, checkpoint)
    else:
        model, give_values = _build_divisible(cfg, checkpoint)
    world.meet("making the model")
    callbacks = []
    window = cfg.data.sequence_length
    if tokenizer is not None and window is not None and cfg.sample.max_new_tokens > 0:
        if (why := why_silent(model)) is None:
            callbacks.append(SampleText(tokenizer, cfg.sample, window, cfg.data.has_conversations))
        else:
            say(f"no samples: {why}")
    return Trainer(
        model,
        cfg,
        train_loader=data.training_batches(cfg.batch.size, cfg.trainer.accumulate),
        val_loader=data.evaluation_batches(cfg.batch.size),
        callbacks=callbacks,
        tokenizer=tokenizer,
        initialize=give_values,
    )


def build_sweep(cfg: RecipeConfig, chosen: SweepConfig) -> Sweep:
    """Losses over the learning rates that are `chosen`, from the recipe's initial values."""
    cfg = replace(cfg, parallel=ParallelConfig())  # a sweep is one process's
    _device(cfg)
    _check_model_path(cfg)
    data = _build_data(cfg, None, None)
    with announced(f"building {cfg.model.described}"):
        model = _build_model(cfg, None)
    loader = data.training_batches(cfg.batch.size, cfg.trainer.accumulate)
    return find_learning_rate(model, cfg, loader, sweep=chosen)


def build_trained_model(cfg: RecipeConfig, checkpoint: Path) -> tuple[nn.Module, Tokenizer, torch.device]:
    """Model and tokenizer from a checkpoint alone, on their device: no data is needed."""
    device = _device(replace(cfg, parallel=ParallelConfig()))
    if not cfg.data.is_text:
        raise UserError(
            f"{checkpoint}: its model reads images and writes no text; `tputrain validate` judges it"
        )
    model = _build_shape(cfg, checkpoint)
    contents.load_model(model, checkpoint)
    return model.to(device), load_tokenizer(checkpoint), device
