"""Plans by the compiler's figures: one of them, the best of a search, and a smaller one that fits."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from time import monotonic
from typing import Any

from tputrain.announce import say
from tputrain.errors import UserError
from tputrain.figures import memory_text, seconds_text
from tputrain.parallel.candidate import Candidate, Task, modelled
from tputrain.parallel.plan import Plan, make_plan
from tputrain.parallel.plan_report import in_columns
from tputrain.planning.compiled_step import CompiledStep, DoesNotFitError, Subject, compile_step

_TRIES = 3  # smaller plans that are compiled until one fits


@dataclass(frozen=True)
class Judged:
    """A candidate, and what the compiler says of it."""

    candidate: Candidate
    step: CompiledStep | None
    problem: str | None
    """Why there is no compiled step."""
    used: float
    """Bytes of a device."""

    @property
    def seconds(self) -> float:
        return inf if self.step is None else self.step.seconds

    @property
    def is_too_large(self) -> bool:
        """Whether the compiler ran out of memory."""
        return self.step is None and self.used < inf

    def as_json(self, task: Task) -> dict[str, Any]:
        """What a search says of it."""
        compiled = {"missing": self.problem} if self.step is None else self.step.as_json()
        return self.candidate.as_json(task) | {"compiled": compiled}


Judge = Callable[[Candidate], Judged]


def judge_by(subject_of: Callable[[Candidate], Subject], task: Task) -> Judge:
    """Candidates as the compiler sees them. In a process that stands for a rank (`start_slice`)."""

    def judge(candidate: Candidate) -> Judged:
        try:
            step = compile_step(subject_of(candidate), partial(modelled, task, candidate))
        except DoesNotFitError as error:
            return Judged(candidate, None, str(error), error.used)
        return Judged(candidate, step, None, step.memory)

    return judge


def searched(plan: Plan, judge: Judge, seconds: float) -> Iterator[Judged]:
    """The plan and the candidates next to it by the models, as many as are compiled within the time.

    The first one always is. Each further one is taken to need as long as the longest so far.
    """
    assert plan.chosen is not None
    began, longest = monotonic(), 0.0
    for number, candidate in enumerate(_in_order(plan)):
        start = monotonic()
        if number and start - began + longest > seconds:
            break
        say(f"candidate {number + 1}: {candidate.settings(plan.task)}")
        try:
            found = judge(candidate)
        except UserError as error:
            if not number:
                raise
            found = Judged(candidate, None, str(error), inf)
        longest = max(longest, monotonic() - start)
        yield found


def _in_order(plan: Plan) -> Iterator[Candidate]:
    """The plan, then the others that the Trainer can run, the fastest first; of those with the same settings
    the first.
    """
    assert plan.chosen is not None
    others = [each for each in plan.candidates if each.code == "slower"]
    others.sort(key=lambda each: each.seconds.total if each.seconds else inf)
    seen = set()
    for each in (plan.chosen, *others):
        if (settings := each.settings(plan.task)) not in seen:
            seen.add(settings)
            yield each


def winner(plan: Plan, found: Sequence[Judged]) -> Judged:
    """The fastest that fits, by the compiler's figures; the first where none fits."""
    fitting = [each for each in found if each.step is not None and each.used <= plan.task.most]
    return min(fitting, key=lambda each: each.seconds) if fitting else found[0]


def change_that_fits(plan: Plan, judge: Judge, too_large: Judged) -> str | None:
    """A smaller plan that the compiler finds to fit, or why there is none; None: it fits already.

    Smaller is: by as much as the compiler needs more than the models say.
    """
    task, tried = plan.task, too_large
    for _ in range(_TRIES):
        if tried.used <= task.most:
            break
        assert tried.candidate.memory is not None
        smaller = make_plan(replace(task, usable=task.usable * tried.candidate.memory.total / tried.used))
        if smaller.chosen is None:
            further = f"; not compiled: {smaller.changes[0]}" if smaller.changes else ""
            return f"no plan of this slice is small enough by the compiler's figures{further}"
        say(f"does not fit: trying {smaller.chosen.settings(task)}")
        tried = judge(smaller.chosen)
    if tried is too_large:
        return None
    settings, size = tried.candidate.settings(task), f"{memory_text(tried.used)} a device"
    if tried.used <= task.most:
        return f"{settings} fits: {size}, by the compiler"
    return f"{_TRIES} smaller plans do not fit either; the last one needs {size}: {settings}"


def search_lines(plan: Plan, found: Sequence[Judged], best: Judged) -> Iterator[str]:
    """A table of what was compiled, the fastest first, beside what the models say."""
    cells = [("", "step", "modelled", "memory", "modelled", "")]
    for each in sorted(found, key=lambda each: each.seconds):
        memory, seconds = each.candidate.memory, each.candidate.seconds
        assert memory is not None
        assert seconds is not None
        fits = "" if each.used <= plan.task.most else "does not fit: "
        cells.append(
            (
                "winner" if each is best and not fits else "",
                "-" if each.step is None else seconds_text(each.seconds),
                seconds_text(seconds.total),
                "-" if each.used == inf else memory_text(each.used),
                memory_text(memory.total),
                f"{fits}{each.candidate.settings(plan.task)}",
            )
        )
    yield ""
    yield f"{len(found)} compiled:"
    yield from in_columns(cells)
