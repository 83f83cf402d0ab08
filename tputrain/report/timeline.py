"""What happened at which step: starts and resumes, checkpoints, evaluations, compilations."""

from collections.abc import Sequence
from html import escape

from tputrain.figures import moment
from tputrain.report.run_files import Run, is_number

Mark = tuple[float, str]
"""(step, what the pointer shows)."""


def timeline(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """HTML: a strip a kind of event and run, all over the same steps; what was not recorded is left out."""
    num_steps = max(1, *(run.step for run in runs))
    strips = "".join(
        ("" if len(runs) == 1 else f'<p class="of">{escape(label)}</p>') + _strips_of(run, num_steps)
        for run, label in zip(runs, labels)
    )
    ends = f'<div class="ends"><span>0</span><span>step {num_steps:,}</span></div>'
    return f'<div class="timeline">{strips}{ends}</div>'


def _strips_of(run: Run, num_steps: int) -> str:
    rows = {
        "starts": _starts(run),
        "checkpoints": _saves(run),
        "evaluations": [
            (record["step"], f"evaluation at step {record['step']:,}") for record in run.evaluations
        ],
        "compilations": [
            (record["step"], f"step {record['step']:,}: {record['compilations']} compiled")
            for record in run.steps
            if is_number(record.get("compilations")) and record["compilations"] > 0
        ],
    }
    return "".join(_strip(name, marks, num_steps) for name, marks in rows.items() if marks)


def _starts(run: Run) -> list[Mark]:
    words = ["started", *(["resumed"] * len(run.starts))]
    return [
        (event["step"], f"{word} at step {event['step']:,}, {moment(event['time'])}")
        for word, event in zip(words, run.starts)
    ]


def _saves(run: Run) -> list[Mark]:
    saved = [event for event in run.events if event.get("event") == "saved"]
    marks = {event["step"]: f"saved at step {event['step']:,}, {moment(event['time'])}" for event in saved}
    kept = {
        checkpoint.step: f"kept: step {checkpoint.step:,}, {moment(checkpoint.saved_at)}"
        for checkpoint in run.checkpoints
    }
    return sorted((marks | kept).items())


def _strip(name: str, marks: Sequence[Mark], num_steps: int) -> str:
    drawn = "".join(
        f'<i class="{name}" style="left:{_percent(step, num_steps)}%" title="{escape(said)}"></i>'
        for step, said in marks
    )
    count = f"<b>{len(marks):,}</b>"
    return f'<div class="strip"><span>{name} {count}</span><div>{drawn}</div></div>'


def _percent(step: float, num_steps: int) -> str:
    return f"{100 * min(max(step / num_steps, 0), 1):.2f}"
