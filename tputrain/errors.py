"""The error that stands for a mistake its reader can mend."""

_LONGEST = 900  # characters


class UserError(Exception):
    """A mistake of the user: one line that says what was wrong, where, what was expected and what to do.

    It stays one line, of a length that can be read, whatever the value is that it quotes.
    """

    def __init__(self, message: str):
        line = " ".join(part.strip() for part in message.splitlines())
        # What was wrong stands at the beginning, what to do at the end.
        super().__init__(line if len(line) <= _LONGEST else f"{line[:600]} ... {line[-250:]}")
