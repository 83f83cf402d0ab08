"""Whether a run still computes with numbers."""

import math
from collections.abc import Sequence

from tputrain.errors import UserError
from tputrain.loggers.logger import Record


def check_finite(records: Sequence[Record], names: Sequence[str], cause: str = "") -> None:
    """Raise UserError, one line, at the first of `records` in which a value of `names` is infinite or NaN.

    `cause`: what is known of where it came from.

    A gradient norm counts as much as a loss: the update that it belongs to is in the weights already.
    """
    for record in records:
        for name in names:
            if not math.isfinite(record[name]):
                raise stopped(f"step {record['step']}: {name} is {record[name]}", cause)


def stopped(why: str, cause: str = "") -> UserError:
    """The error, one line, that ends a run for what a step computed."""
    return UserError(
        f"{why}; the run stops, so that no checkpoint holds this{cause}; lower optim.learning_rate (or "
        "trainer.max_grad_norm) and run again, it goes on from the newest checkpoint; "
        "trainer.on_nonfinite=skip or rollback leaves such batches out"
    )
