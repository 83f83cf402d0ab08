"""Line charts and histograms as inline SVG, without a script: colours come from the page's style sheet."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from tputrain.report.page_files import page_file
from tputrain.report.series import Point

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 10, 10, 26
NUM_COLOURS = 6  # --run-0 to --run-5 in style.css; after those, dashes tell runs apart

Form = Callable[[float], str]


@dataclass(frozen=True)
class Line:
    """The points of one run; `dots`: drawn as such, with no line between; `faint`: behind a smoothed line."""

    label: str
    number: int
    """The run's place among those compared: its colour."""
    points: Sequence[Point]
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True)
class _Axis:
    """Values from `low` to `high` onto `start` to `end` in the picture."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        share = (self._scaled(value) - self._scaled(self.low)) / (
            self._scaled(self.high) - self._scaled(self.low)
        )
        return round(self.start + share * (self.end - self.start), 1)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def ticks(self) -> list[float]:
        if self.log:
            return _log_ticks(self.low, self.high)
        return _linear_ticks(self.low, self.high)


def line_chart(lines: Sequence[Line], num_steps: float, form: Form, log: bool = False) -> str:
    """An SVG of `lines` over steps 0 to `num_steps`; `log` is given up where a value is not positive."""
    across = _Axis(0, max(num_steps, 1), LEFT, WIDTH - RIGHT)
    up = _up([y for line in lines for _, y in line.points], log)
    # What the pointer shows beside the curve, by hover.js.
    told = [
        [
            line.label,
            line.number,
            [[round(x, 1), across.place(x), up.place(y), form(y)] for x, y in line.points],
        ]
        for line in lines
    ]
    drawn = _grid(across, up, form, "step") + _curves(lines, across, up)
    return _svg(drawn, escape(json.dumps(told), quote=True))


def picture(lines: Sequence[Line], x_name: str, x_form: Form, form: Form) -> str:
    """An SVG file, colours and all, of `lines` over positive values of `x_name` on a logarithmic axis."""
    values = [x for line in lines for x, _ in line.points]
    across = _Axis(min(values), max(values), LEFT, WIDTH - RIGHT, log=True)
    up = _up([y for line in lines for _, y in line.points], log=False)
    drawn = _grid(across, up, form, x_name, x_form) + _curves(lines, across, up)
    style = (
        f"<style>{page_file('style.css')} svg {{ background: var(--card); font-family: sans-serif; }}</style>"
    )
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{style}{drawn}</svg>\n'


def bar_chart(rows: Sequence[tuple[int, Sequence[float]]], low: float, high: float, form: Form) -> str:
    """Histograms over one another: (run's number, share in each bin) from `low` to `high`."""
    most = max(share for _, shares in rows for share in shares)
    across = _Axis(low, high, LEFT, WIDTH - RIGHT)
    up = _Axis(0, most * 1.05, HEIGHT - BOTTOM, TOP)
    bars = []
    for number, shares in rows:
        width = (high - low) / len(shares)
        for place, share in enumerate(shares):
            if share > 0:
                left, right = across.place(low + place * width), across.place(low + (place + 1) * width)
                top = up.place(share)
                said = (
                    f"{form(low + place * width)} to {form(low + (place + 1) * width)}: {100 * share:.1f} %"
                )
                bars.append(
                    f'<rect class="bar r{number % NUM_COLOURS}" x="{left}" y="{top}" '
                    f'width="{max(right - left - 0.5, 0.5):.1f}" height="{HEIGHT - BOTTOM - top:.1f}">'
                    f"<title>{said}</title></rect>"
                )
    return _svg(_grid(across, up, lambda share: f"{100 * share:.0f} %", "", form) + "".join(bars))


def _svg(inside: str, told: str = "") -> str:
    data = f' data-lines="{told}"' if told else ""
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"{data}>{inside}</svg>'


def _up(values: Sequence[float], log: bool) -> _Axis:
    log = log and min(values) > 0
    low, high = _padded(min(values), max(values), log)
    return _Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def _curves(lines: Sequence[Line], across: _Axis, up: _Axis) -> str:
    return "".join(_drawn(line, across, up) for line in lines if line.points)


def _drawn(line: Line, across: _Axis, up: _Axis) -> str:
    kind = f"r{line.number % NUM_COLOURS}" + (" dashed" if line.number >= NUM_COLOURS else "")
    kind += " faint" if line.faint else ""
    places = [(across.place(x), up.place(y)) for x, y in line.points]
    if line.dots:
        return "".join(f'<circle class="{kind} seen" cx="{x}" cy="{y}" r="3.2"/>' for x, y in places)
    if len(places) == 1:
        return f'<circle class="{kind}" cx="{places[0][0]}" cy="{places[0][1]}" r="2"/>'
    return f'<polyline class="{kind}" points="{" ".join(f"{x},{y}" for x, y in places)}"/>'


def _grid(across: _Axis, up: _Axis, form: Form, x_name: str, x_form: Form | None = None) -> str:
    parts = []
    for value in up.ticks():
        y = up.place(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5}" text-anchor="end">{escape(form(value))}</text>')
    say = x_form or (lambda value: f"{value:,.0f}")
    ticks = across.ticks()
    for value in ticks:
        x = across.place(value)
        # A label at the edge must not be cut off.
        anchor = "end" if x > WIDTH - RIGHT - 16 else "middle"
        label = f"{x_name} {say(value)}" if x_name and value == ticks[-1] else say(value)
        parts.append(f'<text x="{x}" y="{HEIGHT - 8}" text-anchor="{anchor}">{escape(label)}</text>')
    base = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base}" y2="{base}"/>')
    return "".join(parts)


def _padded(low: float, high: float, log: bool) -> tuple[float, float]:
    """A little room above and below; a constant gets an axis all the same."""
    if log:
        low, high = low / 1.05, high * 1.05
        return (low, high) if high / low > 1.5 else (low / 1.3, high * 1.3)
    if low >= 0 and low < 0.4 * high:
        return 0.0, high * 1.05
    # Not closer together than labels of three digits can tell.
    room = max(0.05 * (high - low), 0.03 * max(abs(low), abs(high)) - (high - low) / 2) or 1.0
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _linear_ticks(low: float, high: float, about: int = 5) -> list[float]:
    step = _round_step((high - low) / about)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, `step` or a little more."""
    size = 10.0 ** math.floor(math.log10(step))
    return next(factor * size for factor in (1, 2, 5, 10) if factor * size >= step * 0.999)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [tick for tick in _products(powers, factors) if low <= tick <= high]
        if len(ticks) >= 3:
            return ticks[:: math.ceil(len(ticks) / 7)]
    return _linear_ticks(low, high)


def _products(powers: Iterable[int], factors: Sequence[float]) -> list[float]:
    return [factor * 10.0**power for power in powers for factor in factors]
