"""Mistakes that can be seen before PyTorch is loaded, which takes seconds. Imports nothing heavy."""

import argparse
import os
from collections.abc import Sequence
from math import inf
from pathlib import Path

from tputrain.config_checks import expect, expect_at_least
from tputrain.errors import UserError
from tputrain.shipped import find_recipe


def check_command(chosen: argparse.Namespace) -> None:
    """Raise UserError, one line, at the first mistake in the command `chosen`."""
    target = chosen.target
    match chosen.verb:
        case "run":
            _check_recipe(find_recipe(target), chosen.overrides)
        case "lr-find":
            from tputrain.lr_sweep import SweepConfig

            SweepConfig(chosen.lowest, chosen.highest, chosen.steps)
            _check_recipe(find_recipe(target), chosen.overrides)
        case "plan":
            from tputrain.parallel.topology import Topology

            is_finite = chosen.search is None or 0 < chosen.search < inf
            expect(is_finite, "--search", chosen.search, "seconds, more than 0 and not infinite")
            Topology.parse(chosen.topology)
            if chosen.html is not None:
                _check_page(chosen.html)
            _check_recipe(find_recipe(target), chosen.overrides)
        case "validate":
            is_run = Path(target).is_dir()
            recipe = None if is_run else find_recipe(target, expected="run directory or recipe file")
            _check_recipe(recipe, chosen.overrides)
        case "resume":
            _check_run_directory(target)
            for text in chosen.overrides:
                if text.startswith(("run_dir=", "checkpoint.resume=")):
                    raise UserError(f"command line: {text}: resume goes on in {target}; leave that out")
            _check_recipe(None, chosen.overrides)
        case "sample":
            _check_run_directory(target)
            for text in chosen.overrides:
                if text.startswith("sample."):
                    raise UserError(
                        f"{text}: it is of the samples during training; expected --prompt, --max-new-tokens, "
                        "--temperature or --seed"
                    )
            expect(chosen.max_new_tokens >= 1, "--max-new-tokens", chosen.max_new_tokens, "1 or more")
            expect_at_least("--temperature", chosen.temperature or 0.0, 0.0)
            _check_recipe(None, chosen.overrides)
        case "import":
            if not Path(target).is_dir():
                raise UserError(
                    f"{target}: no such directory; expected one with config.json and *.safetensors"
                )
            new_directory(chosen.out)
        case "export":
            if not Path(target).is_dir():
                raise UserError(
                    f"{target}: no such directory; expected a run, such as runs/llama, or a checkpoint"
                )
            new_directory(chosen.out)


def new_directory(out: str) -> Path:
    """The path, if nothing is there yet but perhaps an empty directory."""
    directory = Path(out)
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        raise UserError(f"{directory}: there already; choose another name, nothing was overwritten")
    return directory


def _check_page(name: str) -> None:
    """Raise UserError where the page of a plan could not be written, which comes after minutes."""
    expect(name not in ("", "-"), "--html", name, "the name of a file: the plan itself is on standard output")
    path = Path(name)
    if path.is_dir():
        reason = "it is a directory"
    elif not path.parent.is_dir():
        reason = f"no such directory: {path.parent}"
    elif not os.access(path if path.exists() else path.parent, os.W_OK):
        reason = "no permission"
    else:
        return
    raise UserError(f"--html={name}: cannot be written ({reason}); name another file")


def _check_run_directory(path: str) -> None:
    if not Path(path).is_dir():
        raise UserError(f"{path}: no such directory; expected the directory of a run, such as runs/llama")


def _check_recipe(recipe: Path | None, overrides: Sequence[str]) -> None:
    from tputrain.recipe_keys import check_keys  # a tenth of a second, which only these verbs wait for

    check_keys(overrides, recipe)
