"""The planner's time for published steps."""

import pytest

from tests.benchmarks.published_steps import STEPS, Step, predicted


@pytest.mark.parametrize("step", STEPS, ids=lambda step: f"{step.model}-{step.topology}-{step.rows}")
def test_within_a_tenth_of_what_was_measured(step: Step):
    seconds, _ = predicted(step)
    assert abs(seconds.total / step.seconds - 1) < 0.10
