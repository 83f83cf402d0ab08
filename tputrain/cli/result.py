"""The result of a command, on standard output."""

from typing import TextIO

from tputrain.errors import RunFailedError, in_words


def print_result(text: str, output: TextIO) -> None:
    """Raises RunFailedError, one line, where it cannot be written: a full disk; BrokenPipeError where the
    reader has gone.
    """
    try:
        print(text, file=output, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise RunFailedError(
            f"standard output: {in_words(error)}; the result is not written, send it elsewhere"
        ) from error
