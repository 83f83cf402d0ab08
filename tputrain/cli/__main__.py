"""`python -m tputrain.cli`."""

from tputrain.cli import run

run()
