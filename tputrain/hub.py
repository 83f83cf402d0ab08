"""What is known by a name on the Hugging Face hub, also where there is no network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from tputrain.announce import say
from tputrain.reachable import why_unreachable


def is_path(name: str) -> bool:
    """Whether `name` means a directory: on the hub things are called `name` or `owner/name`. `runs/name` is a
    directory where a folder `runs` is here.
    """
    return (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or ("/" in name and Path(name).parent.is_dir())
    )


@contextmanager
def asking_hub(what: str) -> Iterator[None]:
    """In here the hub's libraries look up `what`, such as `data.tokenizer=gpt2`; a line says so before.

    Where the hub cannot be reached they would try it for a minute: then they may only look at what they have
    fetched before. Raises OSError, one line, where it is not there.
    """
    from huggingface_hub import constants  # with the libraries that need it

    if constants.HF_HUB_OFFLINE:
        yield
        return
    host = urlsplit(constants.ENDPOINT).hostname
    say(f"{what}: no such directory here, so it is fetched from {host} (without a network, name a directory)")
    reason = why_unreachable(constants.ENDPOINT)
    if reason is None:
        yield
        return
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except ImportError:
        raise  # of a library that is missing, whatever the hub says
    except Exception as error:  # what the libraries raise has no common type
        # That it cannot be fetched is said with more words: in an OSError; transformers has ValueErrors, too.
        is_absent = isinstance(error, OSError) or "couldn't connect to" in str(error).lower()
        why = "" if is_absent else f" ({type(error).__name__}: {error})".splitlines()[0][:120]
        raise OSError(f"{host} cannot be reached: {reason}; it was not fetched before{why}") from None
    finally:
        constants.HF_HUB_OFFLINE = False
    say(f"note: {host} cannot be reached ({reason}): {what} is as it was fetched before")
