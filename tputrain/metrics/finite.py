"""Whether a run still computes with numbers."""

import math
from collections.abc import Sequence

from tputrain.errors import UserError
from tputrain.loggers.logger import Record


def check_finite(records: Sequence[Record], names: Sequence[str]) -> None:
    """Raise UserError, one line, at the first of `records` in which a value of `names` is infinite or NaN.

    A gradient norm counts as much as a loss: the update that it belongs to is in the weights already.
    """
    for record in records:
        for name in names:
            if not math.isfinite(record[name]):
                raise UserError(
                    f"step {record['step']}: {name} is {record[name]}; the run stops, so that no checkpoint "
                    "holds this: lower optim.learning_rate (or trainer.max_grad_norm) and run again, it goes "
                    "on from the newest checkpoint; execution.train=debug with TPU_DEBUG_NANS=1 names the "
                    "operation; trainer.on_nonfinite=continue trains on"
                )
