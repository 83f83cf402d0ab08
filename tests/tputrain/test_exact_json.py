"""What is written as JSON is JSON, and is read back as it was."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tputrain import exact_json

KEYS = st.one_of(st.text(), st.sampled_from(["$float", "$pairs"]), st.integers(), st.floats(allow_nan=False))
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
VALUES = st.recursive(
    LEAVES, lambda inner: st.one_of(st.lists(inner), st.dictionaries(KEYS, inner, max_size=3)), max_leaves=12
)


def strictly(text: str) -> Any:
    """Read by the standard, which has no NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(VALUES)
def test_any_value_is_valid_json_and_comes_back_exactly(value):
    text = exact_json.dumps(value)
    strictly(text)
    assert repr(exact_json.loads(text)) == repr(value)  # equal would take 1 for True, and NaN for nothing


def test_values_that_json_knows_are_written_as_ever():
    value = {"step": 3, "best": None, "betas": [0.9, 0.95], "nested": {"a": True}}
    assert exact_json.dumps(value, indent=1) == json.dumps(value, indent=1)


def test_what_earlier_versions_wrote_is_read_too():
    assert math.isnan(exact_json.loads('{"loss": NaN}')["loss"])


@pytest.mark.parametrize("value", [{(1, 2): 3}, {"a": {1, 2}}, object()])
def test_what_is_no_json_at_all_is_refused(value):
    with pytest.raises(TypeError, match="not JSON serializable"):
        exact_json.dumps(value)


@pytest.mark.parametrize(
    "text", ['{"$float": "much"}', '{"$float": []}', '{"$pairs": 3}', '{"$pairs": [[[], 1]]}']
)
def test_a_mark_that_nobody_writes_is_an_error(text):
    with pytest.raises((TypeError, ValueError)):
        exact_json.loads(text)
