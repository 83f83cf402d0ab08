"""Which numbers of a run are drawn, and as how many points."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tputrain.figures import bytes_text, plain, scientific, seconds_text, share
from tputrain.loggers.logger import Record
from tputrain.report.run_files import Run, is_number

Point = tuple[float, float]
"""(step, value)."""

MOST_POINTS = 300  # of a line: what the width of a chart can show
FEWEST_SMOOTHED = 100  # points
NOISY = 6.0  # a curve that travels so many times its range; one that only falls travels it once


@dataclass(frozen=True)
class Measure:
    """A number that is logged, and how it is shown."""

    key: str
    title: str
    note: str = ""
    form: Callable[[float], str] = plain
    log: bool = False
    """On a logarithmic axis."""


STEP_MEASURES = (
    Measure("loss", "Loss", "training; dots: evaluations"),
    Measure("learning_rate", "Learning rate", form=scientific),
    Measure("grad_norm", "Gradient norm", "before clipping", log=True),
    Measure("tokens_per_second", "Tokens per second"),
    Measure("samples_per_second", "Samples per second"),
    Measure("mfu", "Model FLOPs utilisation", form=share),
    Measure("step_seconds", "Step time", "mean of each logging interval", form=seconds_text, log=True),
    Measure("host_seconds", "Host time of a step", "recording and dispatch", form=seconds_text, log=True),
    Measure("data_wait", "Data wait", "share of the step time", form=share),
    Measure("peak_memory_bytes", "Peak memory", form=bytes_text),
    Measure("memory_bytes", "Memory", "at the end of a logging interval", form=bytes_text),
    Measure("step_seconds_p50", "Step time, median", "of the last steps", form=seconds_text),
    Measure("step_seconds_p90", "Step time, 90th percentile", "of the last steps", form=seconds_text),
    Measure("step_seconds_p99", "Step time, 99th percentile", "of the last steps", form=seconds_text),
)
EVALUATION_MEASURES = (
    Measure("perplexity", "Perplexity", "evaluations", log=True),
    Measure("bits_per_byte", "Bits per byte", "evaluations"),
)
# Drawn elsewhere, or no measure: what a run has counted, and how long an evaluation took.
_NOT_DRAWN = {"step", "tokens", "samples", "compilations", "disk_hits", "seconds", "loss", "time"}


def measures(runs: Sequence[Run]) -> tuple[list[Measure], list[Measure]]:
    """What any of `runs` logged, in steps and in evaluations; unknown numbers under their own name."""
    steps = _logged([run.steps for run in runs], STEP_MEASURES, "")
    evaluations = _logged([run.evaluations for run in runs], EVALUATION_MEASURES, "evaluations")
    return steps, evaluations


def _logged(recorded: list[list[Record]], known: Sequence[Measure], note: str) -> list[Measure]:
    # A dict keeps the order in which the keys came; a record may lack what another has.
    keys = {
        key: None
        for records in recorded
        for record in records
        for key, value in record.items()
        if is_number(value)
    }
    drawn = [measure for measure in known if measure.key in keys]
    named = {measure.key for measure in known} | _NOT_DRAWN
    return drawn + [Measure(key, key.replace("_", " "), note) for key in keys if key not in named]


def points(records: Sequence[Record], key: str) -> list[Point]:
    """(step, value) of each record that has a finite number there."""
    return [(record["step"], record[key]) for record in records if is_number(record.get(key))]


def thinned(values: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: the mean of neighbours, so that a long run's curve keeps its shape."""
    size = math.ceil(len(values) / most)
    if size <= 1:
        return list(values)
    groups = (values[start : start + size] for start in range(0, len(values), size))
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups
    ]


def is_noisy(values: Sequence[Point]) -> bool:
    """Whether a curve goes up and down so much that its course is hard to see."""
    heights = [y for _, y in values]
    if len(heights) < FEWEST_SMOOTHED:
        return False
    travelled = sum(abs(now - before) for before, now in pairwise(heights))
    return travelled > NOISY * (max(heights) - min(heights))


def smoothed(values: Sequence[Point]) -> list[Point]:
    """The exponential moving average over about a fiftieth of the points; it begins at the first."""
    decay = 1 - min(1.0, 50 / len(values))
    average = weight = 0.0
    found = []
    for x, y in values:
        average, weight = decay * average + (1 - decay) * y, decay * weight + (1 - decay)
        found.append((x, average / weight))
    return found


def percentile(values: Sequence[float], share_below: float) -> float:
    """The smallest of `values` that at least `share_below` of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share_below * len(ordered)) - 1)]


def histogram(values: Sequence[float], low: float, high: float, num_bins: int) -> list[float]:
    """Shares of `values` in equal bins from `low` to `high`; what lies beyond counts in the last bin."""
    counts = [0] * num_bins
    for value in values:
        place = int((value - low) / (high - low) * num_bins)
        counts[min(max(place, 0), num_bins - 1)] += 1
    return [count / len(values) for count in counts]
