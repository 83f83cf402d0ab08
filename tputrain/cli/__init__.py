"""The command `tputrain`. Importing this imports nothing heavy: the first line must come at once."""

try:
    from tputrain.cli.command import main, run
except KeyboardInterrupt:  # Ctrl-C in the first moment: no traceback of imports
    raise SystemExit(130) from None

__all__ = ["main", "run"]
