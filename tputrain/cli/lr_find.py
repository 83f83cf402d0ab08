"""`tputrain lr-find`: a sweep over learning rates for a recipe, as a table, a file and a picture."""

import os
from pathlib import Path

from tputrain import exact_json
from tputrain.announce import say
from tputrain.errors import UserError
from tputrain.job import build_sweep
from tputrain.lr_finder import Sweep
from tputrain.lr_sweep import SweepConfig
from tputrain.recipe import read_recipe
from tputrain.report.chart import NUM_COLOURS, Line, picture
from tputrain.shipped import default_run_dir, find_recipe

_ROWS = 12


def lr_find(recipe: str, overrides: list[str], chosen: SweepConfig) -> int:
    """Sweep from the recipe's initial values; the run itself, if there is one, is not looked at."""
    path = find_recipe(recipe)
    cfg = read_recipe(path, overrides)
    directory = Path(cfg.run_dir or default_run_dir(path))
    _make(directory)
    sweep = build_sweep(cfg, chosen)
    _show(sweep)
    suggested = sweep.suggested
    kept = {"suggested": suggested, "at_lowest_loss": sweep.at_lowest_loss, **_columns(sweep)}
    _write(directory / "lr-find.json", exact_json.dumps(kept, indent=1) + "\n")
    _write(directory / "lr-find.svg", figure(sweep))
    lowest = sweep.at_lowest_loss
    if lowest < sweep.rates[-1]:
        say(f"the loss was lowest at learning rate {lowest:.1e} and rose after it: too high to train with")
    elif len(sweep.rates) < chosen.steps:
        say(
            f"the loss was lowest at learning rate {lowest:.1e} and not finite after it: too high to "
            "train with"
        )
    else:
        say(f"the loss still fell at learning rate {lowest:.1e}, the last one: --highest may be larger")
    say(f"it fell fastest at learning rate {suggested:.1e}: try optim.learning_rate={suggested:.1e} or less")
    say(f"curve: {directory / 'lr-find.svg'}; numbers: lr-find.json beside it")
    return 0


def figure(sweep: Sweep) -> str:
    """The losses over the learning rate as an SVG file: smoothed ones as a line, the suggestion dashed."""
    smoothed = [float(loss) for loss in sweep.smoothed]
    low, high = min(smoothed), max(smoothed)
    losses = [min(max(loss, low), high) for loss in sweep.losses]
    lines = [
        Line("loss", 1, list(zip(sweep.rates, losses, strict=True)), dots=True),
        Line("smoothed", 0, list(zip(sweep.rates, smoothed, strict=True))),
        Line("suggested", NUM_COLOURS, [(sweep.suggested, low), (sweep.suggested, high)]),
    ]
    return picture(lines, "learning rate", "{:.0e}".format, "{:.2f}".format)


def _columns(sweep: Sweep) -> dict[str, list[float]]:
    return {"rates": sweep.rates, "losses": sweep.losses, "smoothed": sweep.smoothed.tolist()}


def _show(sweep: Sweep) -> None:
    say("learning rate      loss  smoothed loss")
    smoothed = sweep.smoothed
    stride = -(-len(sweep.rates) // _ROWS)
    for place in range(0, len(sweep.rates), stride):
        say(f"{sweep.rates[place]:13.1e}  {sweep.losses[place]:8.4f}  {smoothed[place]:13.4f}")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"run_dir={directory}: cannot be made ({error.strerror}); choose another") from None
    if not os.access(directory, os.W_OK):
        raise UserError(f"run_dir={directory}: cannot be written; choose another")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); choose another run_dir") from None
