"""`python -m tputrain`: the command, also where its script is not on the PATH."""

from tputrain.cli import run

run()
