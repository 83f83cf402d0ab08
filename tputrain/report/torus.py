"""A slice as inline SVG: chips of one plane, links, rings, and which axis of the mesh each direction has."""

from html import escape

from tputrain.parallel.layout import INNERMOST_FIRST, Layout
from tputrain.parallel.plan_report import legend
from tputrain.report.chart import NUM_COLOURS

_MOST = 16  # chips of an axis in the picture
_STEP, _CHIP, _MARGIN = 34, 20, 46


def torus(layout: Layout) -> str:
    """Two directions, the last ones longer than 1. A colour is a replica; thick links join tensor ranks."""
    axes, splits = layout.topology.axes, layout.splits
    across, down = layout.drawn_axes()
    columns = min(axes[across].size, _MOST)
    rows = 1 if down is None else min(axes[down].size, _MOST)
    parts = []
    for row in range(rows):
        for column in range(columns):
            parts.append(_chip(layout, column, row))
            if column + 1 < columns:
                is_joined = (column + 1) % splits[across][0] != 0
                parts.insert(0, _link(column, row, column + 1, row, is_joined))
            if row + 1 < rows and down is not None:
                is_joined = (row + 1) % splits[down][0] != 0
                parts.insert(0, _link(column, row, column, row + 1, is_joined))
    width, height = _middle(columns - 1) + _CHIP, _middle(rows - 1) + _CHIP
    drawn = [axes[index] for index in (down, across) if index is not None]
    for axis in drawn:
        if axis.wraps and axis.size <= _MOST:
            parts.append(_wrap(axis is axes[across], columns, rows))
    said = legend(layout, ("across:", "down:", "not drawn:"))
    if any(axis.size > _MOST for axis in drawn):
        said.append(f"{_MOST} chips of an axis are drawn")
    items = "".join(f"<li>{escape(each)}</li>" for each in said)
    scale = f'style="max-width:{2 * width}px"'
    return (
        f'<svg class="torus" viewBox="0 0 {width} {height}" role="img" {scale}>{"".join(parts)}</svg>'
        f"<ul>{items}</ul>"
    )


def _middle(number: int) -> int:
    return _MARGIN + number * _STEP


def _chip(layout: Layout, column: int, row: int) -> str:
    place = layout.place_drawn(column, row)
    index = layout.index_of(place)
    names = [name for name in reversed(INNERMOST_FIRST) if layout.degrees[name] > 1]
    said = ", ".join(f"{name} {index[name]}" for name in names) or "alone"
    at = " ".join(f"{axis.name}={each}" for axis, each in zip(layout.topology.axes, place, strict=True))
    x, y = _middle(column) - _CHIP / 2, _middle(row) - _CHIP / 2
    colour = index["replicate"] % NUM_COLOURS
    return (
        f'<rect class="chip bar r{colour}" x="{x}" y="{y}" width="{_CHIP}" height="{_CHIP}" rx="4">'
        f"<title>{escape(f'{at}: {said}')}</title></rect>"
    )


def _link(x1: int, y1: int, x2: int, y2: int, is_joined: bool) -> str:
    kind = "joined" if is_joined else "grid"
    ends = f'x1="{_middle(x1)}" y1="{_middle(y1)}" x2="{_middle(x2)}" y2="{_middle(y2)}"'
    return f'<line class="{kind}" {ends}/>'


def _wrap(is_across: bool, columns: int, rows: int) -> str:
    """One arc for all rings of a direction, at its edge."""
    first, last = _middle(0), _middle((columns if is_across else rows) - 1)
    edge = _MARGIN - _CHIP
    line = (
        f"M {first} {edge} C {first} 4, {last} 4, {last} {edge}"
        if is_across
        else f"M {edge} {first} C 4 {first}, 4 {last}, {edge} {last}"
    )
    return f'<path class="ring" d="{line}"/>'
