"""The error that stands for a mistake its reader can mend."""


class UserError(Exception):
    """A mistake of the user: one line that says what was wrong, where, what was expected and what to do."""
