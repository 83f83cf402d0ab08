"""The counts of steady_state.py for the recipe as the Trainer runs it, evaluation and sample included."""

import sys

from tests.benchmarks.bars import Row, print_table
from tests.benchmarks.steady_state import Counts, fallback_row
from tputrain import Callback, Trainer
from tputrain.job import Recipe
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe

STEPS, WARM_STEPS, LOG_EVERY = 17, 3, 5


class CountSteps(Callback):
    """What the device did from the end of one step to the end of the next, by step."""

    def __init__(self) -> None:
        self.counts: dict[int, dict[str, float]] = {}
        self.since_last: Counts | None = None

    def on_fit_start(self, trainer: Trainer) -> None:
        self.since_last = Counts()

    def on_step_end(self, trainer: Trainer) -> None:
        assert self.since_last is not None
        self.counts[trainer.step] = self.since_last.since()


def rows(recipe: str = "llama", overrides: tuple[str, ...] = ()) -> list[Row]:
    shortened = (
        *(f"trainer.steps={STEPS}", "schedule.warmup_steps=5", f"log.every={LOG_EVERY}"),
        *("trainer.evaluate_every=1000", "trainer.evaluate_batches=2", "sample.max_new_tokens=4"),
    )
    trainer = Recipe(read_recipe(find_recipe(recipe), [*shortened, *overrides])).build_from(None)
    counting = CountSteps()
    trainer.callbacks.append(counting)
    trainer.fit()

    steady = {step: counts for step, counts in counting.counts.items() if step > WARM_STEPS}
    # The read of a log step comes after its end, and is counted with the next.
    between = [counts for step, counts in steady.items() if (step - 1) % LOG_EVERY]
    segments = [counts["segments_run"] for counts in steady.values()]
    steps = f"steps {WARM_STEPS + 1} to {STEPS}"
    return [
        Row(
            f"recipe {recipe}: segments a step",
            max(segments, key=lambda count: abs(count - 1)),
            "==",
            1,
            f"{steps}: {sorted(set(segments))}",
        ),
        Row(
            f"recipe {recipe}: compilations after step {WARM_STEPS}",
            sum(counts["compilations"] for counts in steady.values()),
            "==",
            0,
            steps,
        ),
        Row(
            f"recipe {recipe}: host reads between log steps",
            sum(counts["host_reads"] for counts in between),
            "==",
            0,
            f"{steps}, log every {LOG_EVERY}",
        ),
        fallback_row(f"recipe {recipe}: operators that fell back to the CPU"),
    ]


if __name__ == "__main__":
    sys.exit(not print_table(rows()))
