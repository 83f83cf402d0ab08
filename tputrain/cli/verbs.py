"""run, resume, validate and sample."""

import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from tputrain.announce import announced, say
from tputrain.checkpoint import CHECKPOINTS
from tputrain.checkpoint.store import CheckpointStore
from tputrain.data import Tokenizer
from tputrain.device import describe_programs, find_device
from tputrain.errors import UserError
from tputrain.execution import Execution
from tputrain.job import (
    Recipe,
    build_evaluation,
    build_trained_model,
    check_before_ranks,
    check_files,
    load_recipe,
)
from tputrain.loop.position import Position, restore
from tputrain.parallel.cluster import hosts
from tputrain.parallel.launched import is_launched, launched_by
from tputrain.parallel.world import ALONE, World, join
from tputrain.recipe import RecipeConfig, config_from_json, kind_keys
from tputrain.report.run_files import is_run
from tputrain.resume import (
    check_same_run,
    copy_missed,
    locked_where_changed,
    newest_checkpoint,
    started_from,
)
from tputrain.run_lock import RunLock
from tputrain.sampling import Speed, generate, why_silent
from tputrain.shipped import find_recipe
from tputrain.signals import Interrupted
from tputrain.snapshot import contents
from tputrain.trainer import Trainer


def run(recipe: str, overrides: Sequence[str]) -> int:
    """Train, or go on training; a finished run is left alone."""
    cfg = load_recipe(recipe, *overrides).cfg
    command = f"tputrain run {shlex.quote(recipe)}"
    goes_on = cfg.checkpoint.resume == "auto"
    if _is_launcher(cfg):
        started = started_from(cfg) if goes_on and hosts().size == 1 else None
        if _says_finished(cfg, started, command, overrides):
            return 0
        check_before_ranks(cfg, started)
        return _launch(cfg, ["run", recipe, *overrides])
    started = _world(cfg).first(lambda: started_from(cfg)) if goes_on else None
    return _train(cfg, started, command, overrides)


def resume(run_dir: str, overrides: Sequence[str]) -> int:
    """Go on with a run as its checkpoint says it was configured, with `overrides` on top."""
    # A rank only reads here: it does not know the others before, and the Trainer mends what is to be mended.
    store = CheckpointStore(Path(run_dir) / CHECKPOINTS)
    with nullcontext() if is_launched() else locked_where_changed(store, run_dir):
        checkpoint, state = _newest(run_dir, only=(contents.STATE, Tokenizer.FILE))
    saved = dict(state["config"])
    if isinstance(saved.get("trainer"), dict):
        # It follows from the batch, which may be asked to be another; that is spoken of below.
        saved["trainer"] = {key: value for key, value in saved["trainer"].items() if key != "accumulate"}
    source = str(checkpoint / contents.STATE)
    try:
        cfg = config_from_json(saved, source, overrides)
    except UserError:
        # A setting may not fit only because another kind is asked for, and that is what is refused then.
        kinds = [text for text in overrides if text.partition("=")[0] in kind_keys()]
        check_same_run(config_from_json(saved, source, kinds), state, checkpoint)
        raise
    cfg = replace(cfg, run_dir=run_dir, checkpoint=replace(cfg.checkpoint, resume="auto"))
    check_same_run(cfg, state, checkpoint)
    command = f"tputrain resume {shlex.quote(run_dir)}"
    if _is_launcher(cfg):
        # Of several hosts one may have begun before another one looks: there the ranks find out, together.
        if hosts().size == 1 and _says_finished(cfg, checkpoint, command, overrides):
            return 0
        check_before_ranks(cfg, checkpoint)
        return _launch(cfg, ["resume", run_dir, *overrides])
    return _train(cfg, checkpoint, command, overrides)


def _is_launcher(cfg: RecipeConfig) -> bool:
    """Whether this process is to start the ranks, and is none itself."""
    return cfg.parallel.processes * hosts().size > 1 and not is_launched()


def _world(cfg: RecipeConfig) -> World:
    """The ranks of the run: the first one looks into its directory, where something may have to be mended."""
    return join(cfg.parallel, find_device(cfg.device))


def _launch(cfg: RecipeConfig, arguments: Sequence[str]) -> int:
    from tputrain.parallel.launch import Launcher  # only whoever starts ranks needs one

    def newest_step() -> int:
        checkpoint = newest_checkpoint(cfg, only=(contents.STATE, Tokenizer.FILE))
        return 0 if checkpoint is None else int(contents.load_state(checkpoint)["step"])

    # Ranks that are started again go on, whatever was there when the command began.
    again = [*arguments, "checkpoint.resume=auto"] if cfg.checkpoint.resume == "never" else arguments
    return Launcher(cfg.parallel, Path(str(cfg.run_dir)), arguments, again, newest_step).run()


def _train(cfg: RecipeConfig, started: Path | None, command: str, overrides: Sequence[str]) -> int:
    """Train to the last step. `command` and `overrides`: what to say for making the run longer."""
    command = launched_by() + command
    if _says_finished(cfg, started, command, overrides):
        return 0
    with RunLock(Path(str(cfg.run_dir))) if not is_launched() else nullcontext():
        pass  # a directory that cannot be used is reported before anything takes long
    trainer = Recipe(cfg).build_from(started)
    try:
        trainer.fit()
    except Interrupted:
        _say_what_next(trainer, cfg, command + _as_arguments(overrides))
        raise
    if (programs := describe_programs(trainer.device)) is not None:
        say(f"programs: {programs}")
    longer = _longer(cfg, command, overrides, 2 * cfg.trainer.steps)
    _say_what_next(trainer, cfg, longer)
    return 0


def _says_finished(cfg: RecipeConfig, started: Path | None, command: str, overrides: Sequence[str]) -> bool:
    """Whether the run, which goes on from `started`, is finished; then it is said how to make it longer, and
    its last checkpoint is copied to the mirror, if that was missed.
    """
    world = ALONE if _is_launcher(cfg) else _world(cfg)
    if started is None or not world.first(lambda: _is_finished(cfg, started)):
        return False
    world.first(lambda: copy_missed(cfg, started))
    done, asked = contents.load_state(started)["step"], cfg.trainer.steps
    is_exact = done == asked or cfg.trainer.duration is not None
    what = f"its {done} steps" if is_exact else f"{done} steps, more than trainer.steps={asked}"
    say(f"{cfg.run_dir} is finished: it has done {what}. To make it longer:")
    say(f"  {_longer(cfg, command, overrides, 2 * done)}")
    return True


def _longer(cfg: RecipeConfig, command: str, overrides: Sequence[str], steps: int) -> str:
    """The command for a run of `steps`; of one with a duration, for twice as long."""
    lengths = ("trainer.steps=", "trainer.duration=")
    kept = [text for text in overrides if not text.startswith(lengths)]
    setting = f"trainer.steps={steps}" if cfg.trainer.duration is None else cfg.trainer.length.doubled
    return f"{command}{_as_arguments([*kept, setting])}"


def _as_arguments(overrides: Sequence[str]) -> str:
    """Overrides for a shell, without those that a later one of the same key replaces."""
    kept: list[str] = []
    for text in overrides:
        key, _, value = text.partition("=")
        if not value.startswith("{"):  # a mapping is merged into what was there
            kept = [each for each in kept if each.partition("=")[0] != key]
        kept.append(text)
    return "".join(f" {shlex.quote(text)}" for text in kept)


def validate(target: str, overrides: Sequence[str]) -> int:
    """Evaluate the newest checkpoint of a run directory; a recipe is only checked."""
    if not Path(target).is_dir():
        path = find_recipe(target, expected="run directory or recipe file")
        cfg = load_recipe(path, *overrides).cfg
        cfg.check_limits(*cfg.model.limits_there())
        check_files(cfg)
        length = cfg.trainer.duration or f"{cfg.trainer.steps} steps"
        say(f"{path}: valid; {length}, {cfg.batch.arithmetic(cfg.data.sequence_length)}")
        return 0
    checkpoint, cfg = _trained(target, overrides)
    trainer = build_evaluation(replace(cfg, run_dir=None), checkpoint)
    trainer.resume(checkpoint, is_checked=True)
    for name, value in trainer.validate().items():
        say(f"{name.replace('_', ' ')}: {value:.4f}")
    return 0


def sample(
    run_dir: str,
    overrides: Sequence[str],
    prompt: str,
    max_new_tokens: int,
    temperature: float | None,
    seed: int,
) -> str:
    """Text that the newest checkpoint of a run writes. `temperature`: None: the recipe's."""
    checkpoint, cfg = _trained(run_dir, overrides)
    model, tokenizer, device = build_trained_model(cfg, checkpoint)
    window = cfg.data.sequence_length
    assert window is not None, "a model without text was refused"
    execution, speed = Execution(model, device, cfg.execution), Speed()
    with announced("writing"), execution.phase("sample"):
        text = generate(
            execution.model,
            tokenizer,
            prompt,
            max_new_tokens,
            temperature=cfg.sample.temperature if temperature is None else temperature,
            seed=seed,
            window=window,
            speed=speed,
            in_conversation=cfg.data.has_conversations,
        )
    say(speed.said)
    return text


def _trained(run_dir: str, overrides: Sequence[str]) -> tuple[Path, RecipeConfig]:
    """The newest whole checkpoint of a run, and the configuration it was made with."""
    checkpoint, state = _newest(run_dir)
    return checkpoint, config_from_json(state["config"], str(checkpoint / contents.STATE), overrides)


def _newest(run_dir: str, only: tuple[str, ...] = ()) -> tuple[Path, dict[str, Any]]:
    """The newest whole checkpoint of a run (`only`: in these files), and its state."""
    store = CheckpointStore(Path(run_dir) / CHECKPOINTS)
    checkpoint = store.newest(only=only)
    if checkpoint is None:
        expected = "the run has saved none yet" if is_run(Path(run_dir)) else "expected a run directory"
        raise UserError(f"{run_dir}: no whole checkpoint in {store.directory}; {expected}")
    state = contents.load_state(checkpoint)
    if "model" not in state["config"]:
        raise UserError(
            f"{run_dir}: a script made this run, and only it knows the model: run the script again to go on"
        )
    return checkpoint, state


def _is_finished(cfg: RecipeConfig, checkpoint: Path) -> bool:
    """Whether the run has nothing left to do, and what it came to is whole."""
    state, run = contents.load_state(checkpoint), Position()
    restore(run, state)
    is_finished = cfg.trainer.length.is_reached(run) and run.evaluated_at == run.step
    return is_finished and newest_checkpoint(cfg) == checkpoint


def _say_what_next(trainer: Trainer, cfg: RecipeConfig, command: str) -> None:
    say(f"checkpoint  {Path(str(cfg.run_dir)) / 'checkpoints' / f'step-{trainer.step}'}")
    if cfg.data.is_text and why_silent(trainer.model) is None:
        run_dir, prompt = shlex.quote(str(cfg.run_dir)), _quoted(cfg.sample.prompt)
        say(f"sample      tputrain sample {run_dir} --prompt {prompt}")
    say(f"resume      {command}")


def _quoted(prompt: str) -> str:
    """The prompt as a shell takes it, on one line."""
    if prompt.replace(" ", "").isalnum():
        return f'"{prompt}"'
    if prompt.isprintable():
        return shlex.quote(prompt)
    # Python's escapes are the shell's; of a text with both kinds of quotes it writes the single ones escaped.
    return "$'" + repr('"' + prompt)[2:]
