"""`tputrain ls`: the runs below a directory."""

import time
from collections.abc import Iterator
from pathlib import Path

from tputrain.announce import say
from tputrain.checkpoint import CHECKPOINTS
from tputrain.errors import UserError
from tputrain.figures import seconds_text
from tputrain.loggers.logger import Record
from tputrain.report.run_files import Run, is_run, read_run
from tputrain.report.series import points

_FIRST_RUN = "`tputrain run llama` makes one in runs/llama"
_DEEPEST = 4  # directories below the one that was named


def list_runs(directory: str) -> int:
    """Print a line a run: name, step, losses, state, age; the one last written to comes last."""
    top = Path(directory)
    if not top.is_dir():
        raise UserError(f"{directory}: no such directory; {_FIRST_RUN}")
    rows, unreadable = [], []
    for path in sorted(find_runs(top)):
        try:
            rows.append(_row(read_run(path), path, top))
        except UserError as error:
            unreadable.append(str(error))
    if not rows and not unreadable:
        raise UserError(f"{directory}: no run in it; {_FIRST_RUN}")
    table = [("run", "step", "loss", "evaluation", "state", "written"), *(row[1:] for row in sorted(rows))]
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        numbers = [row[column].rjust(widths[column]) for column in (1, 2, 3)]
        say("  ".join([row[0].ljust(widths[0]), *numbers, row[4].ljust(widths[4]), row[5]]).rstrip())
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


def _row(run: Run, path: Path, top: Path) -> tuple[float, str, str, str, str, str, str]:
    asked = f"/{run.num_steps:,}" if run.num_steps is not None else ""
    ago = f"{seconds_text(max(1.0, time.time() - run.changed_at))} ago" if run.changed_at else "–"
    name = str(path) if path == top else str(path.relative_to(top))
    return (
        run.changed_at,
        name,
        f"{run.step:,}{asked}",
        _last(run.steps),
        _last(run.evaluations),
        run.state,
        ago,
    )


def _last(records: list[Record]) -> str:
    last = records[-1] if records else {}
    if "loss" in last and last["loss"] is None:  # JSON has no NaN
        return str(last.get("loss_hex", "nan"))
    losses = points(records, "loss")
    return f"{losses[-1][1]:.4f}" if losses else "–"
