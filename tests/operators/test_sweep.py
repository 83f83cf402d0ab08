"""Every day: a slice of PyTorch's databases in float32, and that what is committed about them is up to date.

The whole: python -m tests.operators.sweep --database all --dtype all --rows FILE
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from tests.operators.accuracy import accuracy
from tests.operators.check import check
from tests.operators.compare import Tolerances, difference, distribution_difference
from tests.operators.database import DATABASES, DTYPES, Entry, entries
from tests.operators.outcome import Row
from tests.operators.place import DEVICE
from tests.operators.reasons import REASONS
from tests.operators.report import DOCUMENT, document, load, merged, summary, title_of
from tests.operators.sweep import Worker
from tests.operators.twin import Twin

# Every n-th entry, so that all families are met, but those with many samples.
_STRIDES = {"op_db": 23, "foreach": 25, "module_db": 23, "optim_db": 7}
_LONG = {"max_pool2d_with_indices_backward", "nn.functional.max_pool2d", "nn.functional.max_pool1d", "unique"}
_SAMPLES = 2
_SLICE = [
    entry
    for database in DATABASES
    for entry in entries(database, "float32")[:: _STRIDES[database]]
    if entry.name not in _LONG
]
# Of the list, what does not hold on every processor. On an AMD EPYC MKL multiplies tiny matrices without FMA,
# and a line search that goes by the last digit takes other steps: there the device must be no farther from
# float64 than the CPU is.
_CPU = Path("/proc/cpuinfo")
_IS_AMD = _CPU.is_file() and "AuthenticAMD" in _CPU.read_text()
_BY_PROCESSOR = {"optim_db LBFGS - float32"}


@pytest.mark.parametrize("entry", _SLICE, ids=lambda entry: entry.key.replace(" ", "-"))
def test_the_committed_list_says_what_an_entry_does(entry: Entry) -> None:
    known = load()
    listed = entry.key in known["fails"] or entry.key in known["rounding"]
    row = _swept(entry) if listed else check(entry, _SAMPLES)
    holds = row.accurate if _IS_AMD and entry.key in _BY_PROCESSOR else row.passed
    assert holds != listed, (
        f"{row.failure or 'passes'}: known.json is out of date, or this is a fault; measure with "
        f"python -m tests.operators.sweep --only {entry.name}"
    )
    if listed:
        assert row.accurate == (entry.key in known["rounding"]), f"{row.failure}: known.json is out of date"
    assert {*row.fallbacks} <= {*known["fallbacks"].get(entry.key, [])}, "known.json is out of date"


def _swept(entry: Entry) -> Row:
    """As the sweep measures it: how an entry rounds depends on XLA's flags."""
    worker = Worker(limit=120)
    try:
        return worker.measure(entry)
    finally:
        worker.stop()


def test_the_document_is_made_of_the_committed_list() -> None:
    assert DOCUMENT.read_text() == document(load()), "run python -m tests.operators.report"


def test_every_listed_entry_exists() -> None:
    known = load()
    present = {entry.key for database in DATABASES for dtype in DTYPES for entry in entries(database, dtype)}
    assert sorted({*known["fails"], *known["rounding"], *known["fallbacks"]} - present) == []


def test_every_reason_is_of_an_entry_that_fails() -> None:
    failing = [Entry.from_key(key) for key in load()["fails"]]
    titles = {title_of(entry) for entry in failing}
    in_one_dtype = {f"{title_of(entry)} {entry.dtype}" for entry in failing}
    assert sorted({*REASONS} - titles - in_one_dtype) == []


# ---- the instrument itself


@pytest.mark.parametrize(
    ("actual", "text"),
    [
        (torch.ones(3), "shape"),
        (torch.ones(2, 3, dtype=torch.float64), "dtype"),
        (torch.ones(3, 2).t(), "strides"),
        (torch.ones(2, 3) + 1e-4, "values"),
        ([torch.ones(2, 3)] * 2, "structure"),
        (torch.ones(2, 3, requires_grad=True), "requires_grad"),
    ],
)
def test_a_difference_is_named(actual, text: str) -> None:
    assert text in (difference(actual, torch.ones(2, 3), Tolerances()) or "")


def test_equal_results_do_not_differ() -> None:
    nested = (torch.tensor([1.0, float("nan")]), [3, None], {"a": torch.ones(1, 2, dtype=torch.bool)})
    assert difference(nested, nested, Tolerances()) is None


def test_distributions_are_told_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(40, 100, generator=generator) for _ in range(2)]
    assert distribution_difference(*draws) is None
    assert "distribution" in (distribution_difference(draws[0], draws[1] * 1.2) or "")


@pytest.mark.parametrize(
    ("device", "cpu", "as_near"),
    [
        ([7.51, torch.inf], [7.54, torch.inf], True),
        ([7.54, torch.inf], [7.51, torch.inf], False),
        ([7.51, torch.inf], [torch.inf, torch.inf], True),  # the CPU overflows on its way
        ([7.7, torch.inf], [torch.inf, torch.inf], False),
        ([torch.inf, torch.inf], [7.51, torch.inf], None),
        ([7.51, 1.0], [7.54, torch.inf], None),
    ],
)
def test_the_nearer_to_float64_is_told(device, cpu, as_near: bool | None) -> None:
    exact = torch.tensor([7.5, 1e6], dtype=torch.float64)  # the second is beyond float16
    found = accuracy(torch.tensor(device).half(), torch.tensor(cpu).half(), exact, Tolerances())
    assert (found and found.as_near) == as_near


def test_twins_keep_geometry_and_sharing() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    window, flipped = Twin(DEVICE).of((base[1:3, ::2], base.t()))
    assert (window.shape, window.stride(), window.storage_offset()) == ((2, 3), (6, 2), 6)
    flipped.zero_()
    assert not window.cpu().any()
    assert base.any()


def test_a_crash_costs_one_entry() -> None:
    worker = Worker(limit=60)
    try:
        row = worker.measure(Entry("op_db", "there is no such operator", "", "float32"))
        assert "exit code" in row.failure
        assert worker.measure(Entry("op_db", "neg", "", "float32")).passed
    finally:
        worker.stop()


def test_rows_replace_what_was_known_of_their_dtype() -> None:
    good = Row("op_db", "add", "", "float32", True, True, True, 3, 0, "", {}, 0.1)
    bad = Row("op_db", "mul", "", "float32", False, False, False, 3, 1, "values", {"aten::mul": 2}, 0.1)
    refused = Row("op_db", "jit", "", "float32", True, True, True, 0, 0, "", {}, 0.1)
    assert Row.from_json(json.dumps(asdict(bad))) == bad
    known = summary([good, bad, refused])
    counts = known["counts"]["op_db float32"]
    assert (counts["passed"], counts["counted"], counts["native"]) == (1, 2, 1)
    assert counts["unmeasured"] == len(entries("op_db", "float32")) - 2
    assert merged(known, [good])["fails"] == {}
