"""`tputrain ls`: the runs below a directory."""

import time
from collections.abc import Iterator
from pathlib import Path

from tputrain.announce import say
from tputrain.checkpoint import CHECKPOINTS
from tputrain.errors import UserError
from tputrain.report.numbers import seconds_text
from tputrain.report.run_files import Run, is_run, read_run
from tputrain.report.series import points

_DEEPEST = 4  # directories below the one that was named


def list_runs(directory: str) -> int:
    """Print a line a run: name, step, loss, state, age; the one last written to comes last."""
    top = Path(directory)
    if not top.is_dir():
        raise UserError(f"{directory}: no such directory; expected one that holds runs, such as runs")
    rows, unreadable = [], []
    for path in sorted(find_runs(top)):
        try:
            rows.append(_row(read_run(path), path, top))
        except UserError as error:
            unreadable.append(str(error))
    if not rows and not unreadable:
        raise UserError(f"{directory}: no run in it; `tputrain run llama` makes one in runs/llama")
    table = [("run", "step", "loss", "state", "written"), *(row[1:] for row in sorted(rows))]
    widths = [max(len(row[column]) for row in table) for column in range(5)]
    for row in table:
        cells = [row[0].ljust(widths[0]), row[1].rjust(widths[1]), row[2].rjust(widths[2])]
        say("  ".join([*cells, row[3].ljust(widths[3]), row[4]]).rstrip())
    for line in unreadable:
        say(f"unreadable: {line}")
    return 0


def find_runs(top: Path, depth: int = 0) -> Iterator[Path]:
    """Run directories at `top` and below, none inside another."""
    if is_run(top):
        yield top
    elif depth < _DEEPEST:
        try:
            below = sorted(path for path in top.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return  # not ours to read
        for path in below:
            if path.name != CHECKPOINTS and not path.name.startswith("."):
                yield from find_runs(path, depth + 1)


def _row(run: Run, path: Path, top: Path) -> tuple[float, str, str, str, str, str]:
    asked = f"/{run.num_steps:,}" if run.num_steps is not None else ""
    # What a run is judged by: its evaluations; before the first, what it was trained on.
    losses = points(run.evaluations, "loss") or points(run.steps, "loss")
    loss = f"{losses[-1][1]:.4f}" if losses else "–"
    ago = f"{seconds_text(max(1.0, time.time() - run.changed_at))} ago" if run.changed_at else "–"
    name = str(path) if path == top else str(path.relative_to(top))
    return run.changed_at, name, f"{run.step:,}{asked}", loss, run.state, ago
