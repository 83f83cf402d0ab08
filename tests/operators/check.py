"""One entry measured, whatever its database."""

from __future__ import annotations

import time
import warnings

import torch

from tests.operators.check_module import check_module
from tests.operators.check_operator import check_operator
from tests.operators.check_optimizer import check_optimizer
from tests.operators.database import Entry
from tests.operators.outcome import Outcome, Row, row_of

# Modules share operators and shapes: a program for each is less than one for all of them together.
_MODES = {"module_db": "strict"}

_CHECKS = {
    "op_db": check_operator,
    "foreach": check_operator,
    "module_db": check_module,
    "optim_db": check_optimizer,
}


def check(entry: Entry, most_samples: int | None = None) -> Row:
    """Measure in this process; a failure of the checking itself is the entry's failure.

    ``most_samples``: a look at that many samples of an operator, evenly spread, instead of a measurement.
    """
    start = time.monotonic()
    torch.tpu.reset_fallback_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.tpu.eager_mode(_MODES.get(entry.database, "fused")):
                outcome = _CHECKS[entry.database](entry, most_samples)
        except Exception as error:
            outcome = Outcome()
            outcome.fail("the check", f"{type(error).__name__}: {error}")
    return row_of(entry, outcome, torch.tpu.fallback_stats(), time.monotonic() - start)
