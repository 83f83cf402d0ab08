"""`tputrain report`: the page of one run or several, written to a file."""

from collections.abc import Sequence
from pathlib import Path

from tputrain.errors import UserError
from tputrain.report import read_run, report_page
from tputrain.report.document import write_page


def write_report(run_dirs: Sequence[str], output: str | None) -> int:
    """Write the page to `output`; by default into the one run directory, or here where there are several."""
    runs = [read_run(Path(run_dir)) for run_dir in run_dirs]
    for run in runs:
        if not run.steps and not run.evaluations:
            raise UserError(
                f"{run.directory}: nothing was logged there yet; wait for the run's first log step"
            )
    beside = runs[0].directory if len(runs) == 1 else Path()
    path = Path(output) if output is not None else beside / "report.html"
    write_page(path, report_page(runs), f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}")
    return 0
