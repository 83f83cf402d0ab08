"""Labels and ids that are larger than the model has room for: whose they were, in one line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tputrain.errors import UserError
from tputrain.user_code import line_of

# PyTorch's words on the CPU; the device's are followed by the operator.
_WORDS = re.compile(
    r"Target \S+ is out of bounds|index out of range in self|index -?\d+ is out of bounds for dimension|"
    r".*\n  in "
)


@contextmanager
def out_of_range_in(which: str) -> Iterator[None]:
    """Raises UserError where an index in here was out of range. `which` names the step or the evaluation, at
    the head of the error.
    """
    try:
        yield
    except IndexError as error:
        if _WORDS.match(str(error)) is None:  # of a list in the user's Python
            raise
        line = line_of(error)
        where = "" if line is None or "\n" in str(error) else f" at {line}"
        raise UserError(
            f"{which}: {error}{where}; expected labels and ids in its batches to be below the sizes that the "
            "model has for them"
        ) from None
