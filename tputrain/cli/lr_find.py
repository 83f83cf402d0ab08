"""`tputrain lr-find`: a sweep over learning rates for a recipe, as a table, a file and a picture."""

import json
import math
import os
from pathlib import Path

from tputrain.announce import say
from tputrain.cli.job import build_sweep
from tputrain.errors import UserError
from tputrain.lr_finder import Sweep, SweepConfig
from tputrain.recipe import load_recipe
from tputrain.shipped import default_run_dir, find_recipe

_ROWS = 12
_WIDTH, _HEIGHT, _MARGIN = 640, 320, 48


def lr_find(recipe: str, overrides: list[str], chosen: SweepConfig) -> int:
    """Sweep from the recipe's initial values; the run itself, if there is one, is not looked at."""
    path = find_recipe(recipe)
    cfg = load_recipe(path, overrides)
    directory = Path(cfg.run_dir or default_run_dir(path))
    _make(directory)
    sweep = build_sweep(cfg, chosen)
    _show(sweep)
    suggested = sweep.suggested
    kept = {"suggested": suggested, "at_lowest_loss": sweep.at_lowest_loss, **_columns(sweep)}
    _write(directory / "lr-find.json", json.dumps(kept, indent=1) + "\n")
    _write(directory / "lr-find.svg", figure(sweep))
    say(f"the loss is lowest at {sweep.at_lowest_loss:.1e}, which is too high to train with")
    say(f"it falls fastest at {suggested:.1e}: optim.learning_rate={suggested:.1e}")
    say(f"curve    {directory / 'lr-find.svg'}, numbers in lr-find.json beside it")
    return 0


def figure(sweep: Sweep) -> str:
    """The losses over the learning rate, which has a logarithmic axis, as an SVG; smoothed ones as a line."""
    smoothed = sweep.smoothed
    low, high = float(min(smoothed)), float(max(smoothed))
    first, last = math.log10(sweep.rates[0]), math.log10(sweep.rates[-1])

    def x(rate: float) -> float:
        share = (math.log10(rate) - first) / max(last - first, 1e-9)
        return round(_MARGIN + share * (_WIDTH - 2 * _MARGIN), 1)

    def y(loss: float) -> float:
        share = (min(max(loss, low), high) - low) / max(high - low, 1e-9)
        return round(_HEIGHT - _MARGIN - share * (_HEIGHT - 2 * _MARGIN), 1)

    def text(place_x: float, place_y: float, said: str, anchor: str = "middle") -> str:
        return f'<text x="{place_x}" y="{place_y}" text-anchor="{anchor}">{said}</text>'

    def upright(rate: float, style: str) -> str:
        return (
            f'<line x1="{x(rate)}" x2="{x(rate)}" y1="{_MARGIN}" y2="{_HEIGHT - _MARGIN}" style="{style}"/>'
        )

    decades = range(math.ceil(first), math.floor(last) + 1)
    line = " ".join(f"{x(rate)},{y(loss)}" for rate, loss in zip(sweep.rates, smoothed, strict=True))
    drawn = [
        *(upright(10.0**decade, "stroke:#ddd") for decade in decades),
        *(text(x(10.0**decade), _HEIGHT - _MARGIN + 18, f"1e{decade}") for decade in decades),
        *(text(_MARGIN - 6, y(loss) + 4, f"{loss:.2f}", "end") for loss in (low, high)),
        *(
            f'<circle cx="{x(rate)}" cy="{y(loss)}" r="1.5" style="fill:#aaa"/>'
            for rate, loss in zip(sweep.rates, sweep.losses, strict=True)
        ),
        f'<polyline points="{line}" style="fill:none;stroke:#2166ac;stroke-width:2"/>',
        upright(sweep.suggested, "stroke:#b2182b;stroke-dasharray:4 3"),
        text(x(sweep.suggested), _MARGIN - 8, f"suggested: {sweep.suggested:.1e}"),
        text(_WIDTH / 2, _HEIGHT - 8, "learning rate"),
    ]
    style = "font:12px sans-serif;background:#fff"
    size = f'width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{style}">\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _columns(sweep: Sweep) -> dict[str, list[float]]:
    return {"rates": sweep.rates, "losses": sweep.losses, "smoothed": sweep.smoothed.tolist()}


def _show(sweep: Sweep) -> None:
    say("learning rate      loss  smoothed")
    smoothed = sweep.smoothed
    stride = -(-len(sweep.rates) // _ROWS)
    for place in range(0, len(sweep.rates), stride):
        say(f"{sweep.rates[place]:13.1e}  {sweep.losses[place]:8.4f}  {smoothed[place]:8.4f}")


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
