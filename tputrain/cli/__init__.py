"""The command `tputrain`. Importing this imports nothing heavy: the first line must come at once."""

from tputrain.cli.command import main, run

__all__ = ["main", "run"]
