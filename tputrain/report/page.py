"""The page: head figures, charts, time line and tables of one run or several, as one HTML text."""

import os
import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from tputrain.config_checks import spelled
from tputrain.errors import UserError
from tputrain.figures import bytes_text, moment, plain, seconds_text
from tputrain.loggers.logger import Record
from tputrain.recipe_layers import leaves
from tputrain.report.chart import NUM_COLOURS, Line, bar_chart, line_chart
from tputrain.report.document import document
from tputrain.report.run_files import Run, is_number
from tputrain.report.series import (
    Measure,
    histogram,
    is_noisy,
    measures,
    percentile,
    points,
    smoothed,
    thinned,
)
from tputrain.report.timeline import timeline

_NUM_BINS = 40


def report_page(runs: Sequence[Run]) -> str:
    """HTML of `runs` that needs no other file and no network. Text from the runs is escaped."""
    title = ", ".join(run.name for run in runs)
    body = "".join(
        [
            _header(runs),
            _figures(runs[0]) if len(runs) == 1 else _table(_rows([_figures_of(run) for run in runs]), runs),
            f'<section class="charts">{"".join(_charts(runs))}</section>',
            f"<h2>Time line</h2>{timeline(runs, labels(runs))}",
            _tables(runs),
        ]
    )
    return document(title, body, has_charts=True)


def _header(runs: Sequence[Run]) -> str:
    names = "".join(
        f'<span class="name">{_swatch(number) if len(runs) > 1 else ""}{escape(label)} '
        f'<span class="state {run.state}">{run.state}</span></span>'
        for number, (run, label) in enumerate(zip(runs, labels(runs)))
    )
    written = f"made {moment(time.time())}; last written {moment(max(run.changed_at for run in runs))}"
    made_with = "".join(f"<p>{_made_with(run)}</p>" for run in runs if run.command)
    return f"<header><h1>{names}</h1>{made_with}<p>{written}</p></header>"


def _made_with(run: Run) -> str:
    device = run.environment.get("device", "")
    return f"<code>{escape(run.command)}</code>" + (f" on {escape(device)}" if device else "")


def _swatch(number: int) -> str:
    return f'<i class="swatch s{number % NUM_COLOURS}"></i>'


def labels(runs: Sequence[Run]) -> list[str]:
    """Names that tell the runs apart: the directory's own, with what is above it where two share that."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    paths = [run.directory.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise UserError("the same run directory was named twice; name each once")
    shared = os.path.commonpath([path.parent for path in paths])
    return [path.relative_to(shared).as_posix() for path in paths]


# -- figures -------------------------------------------------------------------------------------------------


def _figures(run: Run) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in _figures_of(run).items()
    )
    return f'<dl class="figures">{tiles}</dl>'


def _figures_of(run: Run) -> dict[str, str]:
    """The figures a run is judged by, those of them that it logged."""
    asked = "" if run.num_steps is None else f" of {run.num_steps:,}"
    found = {"steps": f"{run.step:,}{asked}"}
    for unit in ("tokens", "samples"):
        counted = points(run.steps, unit)
        if counted:
            found[f"{unit} seen"] = f"{counted[-1][1]:,.0f}"
    losses = points(run.evaluations, "loss")
    if losses:
        step, best = min(losses, key=lambda point: point[1])
        found["best evaluation"] = f"{best:.4f} at step {step:,.0f}"
    elif points(run.steps, "loss"):
        found["last loss"] = f"{points(run.steps, 'loss')[-1][1]:.4f}"
    num_bad = sum("loss" in record and not is_number(record["loss"]) for record in run.steps)
    if num_bad:
        found["non-finite losses"] = f"{num_bad:,}"
    return found | _speed_of(run) | _history_of(run)


def _speed_of(run: Run) -> dict[str, str]:
    found = {}
    seconds = _values(run, "step_seconds")
    if seconds:
        p50, p90, p99 = (seconds_text(percentile(seconds, share)) for share in (0.5, 0.9, 0.99))
        found["step time p50 / p90 / p99"] = f"{p50} / {p90} / {p99}"
        found["training time"] = seconds_text(sum(seconds))
    for unit in ("tokens", "samples"):
        rates = _values(run, f"{unit}_per_second")
        if rates:
            found[f"{unit}/s, median"] = plain(percentile(rates, 0.5))
    memory = _values(run, "peak_memory_bytes")
    if memory:
        found["peak memory"] = bytes_text(max(memory))
    return found


def _history_of(run: Run) -> dict[str, str]:
    found = {}
    if any("compilations" in record for record in run.steps):
        found["programs compiled in steps"] = f"{sum(_values(run, 'compilations')):,.0f}"
    if run.starts:
        resumed = len(run.starts) - 1
        found["resumed"] = {0: "never", 1: "once"}.get(resumed, f"{resumed} times")
    found["checkpoints kept"] = ", ".join(f"step {kept.step:,}" for kept in run.checkpoints) or "none"
    return found


def _values(run: Run, key: str) -> list[float]:
    return [value for _, value in points(run.steps, key)]


# -- charts --------------------------------------------------------------------------------------------------


def _charts(runs: Sequence[Run]) -> Iterable[str]:
    """The loss, what evaluations measured, then the rest of what steps logged."""
    of_steps, of_evaluations = measures(runs)
    steps, evaluations = [run.steps for run in runs], [run.evaluations for run in runs]
    for measure in of_steps[:1]:
        lines = _lines(runs, steps, measure.key)
        if measure.key == "loss":
            lines += _lines(runs, evaluations, "loss", dots=True)
        yield _chart(runs, measure, lines)
    for measure in of_evaluations:
        yield _chart(runs, measure, _lines(runs, evaluations, measure.key))
    for measure in of_steps[1:]:
        yield _chart(runs, measure, _lines(runs, steps, measure.key))
        if measure.key == "step_seconds":
            yield _step_times(runs)


def _lines(runs: Sequence[Run], recorded: Sequence[list[Record]], key: str, dots: bool = False) -> list[Line]:
    """A noisy curve is drawn faintly, with a smoothed one over it."""
    lines = []
    for number, (label, records) in enumerate(zip(labels(runs), recorded)):
        values = points(records, key)
        if dots:
            lines.append(Line(f"{label}, evaluated", number, thinned(values), dots=True))
        elif is_noisy(values):
            lines.append(Line(label, number, thinned(values), faint=True))
            lines.append(Line(f"{label}, smoothed", number, thinned(smoothed(values))))
        else:
            lines.append(Line(label, number, thinned(values)))
    return lines


def _chart(runs: Sequence[Run], measure: Measure, lines: Sequence[Line]) -> str:
    num_steps = max(run.step for run in runs)
    return _figure(measure.title, measure.note, line_chart(lines, num_steps, measure.form, measure.log))


def _step_times(runs: Sequence[Run]) -> str:
    """A histogram up to the 99th percentile of the slowest run: compilations would squeeze the rest."""
    every = [_values(run, "step_seconds") for run in runs]
    low = min(min(values) for values in every if values)
    high = max(percentile(values, 0.99) for values in every if values)
    high = high if high > low else low * 1.1 + 1e-9
    rows = [
        (number, histogram(values, low, high, _NUM_BINS)) for number, values in enumerate(every) if values
    ]
    note = f"last bar: {seconds_text(high)} and more"
    return _figure("Step times", note, bar_chart(rows, low, high, seconds_text))


def _figure(title: str, note: str, svg: str) -> str:
    said = f" <small>{escape(note)}</small>" if note else ""
    return f"<figure><figcaption>{escape(title)}{said}</figcaption>{svg}</figure>"


# -- tables --------------------------------------------------------------------------------------------------


def _tables(runs: Sequence[Run]) -> str:
    configs = _rows([_flat(run.config) for run in runs])
    environments = _rows([_flat(run.environment) for run in runs])
    if len(runs) == 1:
        changed = _rows([_flat(runs[0].changed)])
        of_defaults = (
            f"<h3>Not as by default</h3>{_table(changed, runs)}<h3>All of it</h3>" if changed else ""
        )
        return (
            f"<h2>Configuration</h2>{of_defaults}{_table(configs, runs)}"
            f"<h2>Environment</h2>{_table(environments, runs)}"
        )
    return "".join(
        f"<h2>{title}: what differs</h2>{_table(_differing(rows), runs)}"
        f"<details><summary>{title} of every run</summary>{_table(rows, runs)}</details>"
        for title, rows in (("Configuration", configs), ("Environment", environments))
    )


def _flat(values: dict[str, Any]) -> dict[str, str]:
    """Dotted keys to values as a recipe has them."""
    return {key: spelled(value) for key, value in leaves(values)}


def _rows(columns: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, "–") for column in columns] for key in keys}


def _differing(rows: dict[str, list[str]]) -> dict[str, list[str]]:
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _table(rows: dict[str, list[str]], runs: Sequence[Run]) -> str:
    if not rows:
        return "<p>nothing</p>"
    head = ""
    if len(runs) > 1:
        names = "".join(
            f"<th>{_swatch(number)}{escape(label)}</th>" for number, label in enumerate(labels(runs))
        )
        head = f"<thead><tr><th></th>{names}</tr></thead>"
    lines = "".join(
        f"<tr><th>{escape(key)}</th>{''.join(f'<td>{escape(value)}</td>' for value in values)}</tr>"
        for key, values in rows.items()
    )
    return f'<div class="wide"><table>{head}<tbody>{lines}</tbody></table></div>'
