"""Arguments, exit codes, and which verb does what.

Exit codes: 0; 1 for a failure; 2 for a mistake of the user (one line, no traceback unless --debug); 130 and
143 after SIGINT and SIGTERM.
"""

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from tputrain import __version__
from tputrain.announce import announced, say
from tputrain.errors import UserError
from tputrain.shipped import find_recipe

_EXAMPLES = """examples:
  tputrain run llama                             a recipe that comes with tputrain
  tputrain run recipes/llama.yaml trainer.steps=1000 device=cpu
  tputrain run my.yaml data.files='notes/*.txt'
  tputrain validate runs/llama                   evaluate its newest checkpoint
  tputrain sample runs/llama --prompt "def "
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, or raises SystemExit where a signal ended it."""
    chosen = _parse(arguments)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        return _dispatch(chosen)
    except UserError as error:
        return _report(chosen.debug, str(error), code=2)
    except KeyboardInterrupt:
        said = "interrupted before training began; nothing to save" if chosen.verb == "run" else "interrupted"
        return _report(chosen.debug, said, code=130)
    except BrokenPipeError:
        # The reader of our output (`| head`) has gone: nobody is left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        return _report(chosen.debug, f"{type(error).__name__}: {message} (--debug shows where)", code=1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    # argparse gives up on positional arguments after options; overrides may stand anywhere.
    chosen, rest = parser.parse_known_args(arguments)
    chosen.overrides += rest
    for text in chosen.overrides:
        if text.startswith("-") or "=" not in text:
            parser.error(f"{text!r}: expected key=value, such as trainer.steps=1000")
    return chosen


def _dispatch(chosen: argparse.Namespace) -> int:
    say(f"tputrain {chosen.verb} {chosen.target}")
    if chosen.verb == "run":
        find_recipe(chosen.target)  # before the seconds that the next line takes
    with announced("loading PyTorch"):
        import torch  # noqa: F401
    # Only now: what follows takes seconds to import, and the user should see that something happens.
    from tputrain.cli import verbs

    if chosen.verb == "run":
        return verbs.run(chosen.target, chosen.overrides)
    if chosen.verb == "validate":
        return verbs.validate(chosen.target, chosen.overrides)
    return verbs.sample(
        chosen.target, chosen.overrides, chosen.prompt, chosen.max_new_tokens, chosen.temperature, chosen.seed
    )


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything else here does."""

    def error(self, message: str) -> NoReturn:
        # argparse lists what may be left out among what is missing.
        message = message.replace(", key=value", "").replace("argument VERB: invalid choice", "no such verb")
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help explains\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tputrain",
        description="Train PyTorch models on TPUs, and on the machine in front of you.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tputrain {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _add_verb(verbs, "run", "RECIPE", "a recipe: a YAML file, or the name of a shipped one", "train")
    _add_verb(
        verbs,
        "validate",
        "RUN_DIR",
        "a run directory; or a recipe, which is then only checked",
        "evaluate the newest checkpoint of a run",
    )
    sample = _add_verb(verbs, "sample", "RUN_DIR", "a run directory", "write text with the newest checkpoint")
    sample.add_argument("--prompt", required=True, help='the beginning, such as "def "')
    sample.add_argument("--max-new-tokens", type=int, default=64, help="length of the text (default: 64)")
    sample.add_argument(
        "--temperature", type=float, default=0.8, help="0: the likeliest token (default: 0.8)"
    )
    sample.add_argument("--seed", type=int, default=0, help="another seed, another text (default: 0)")
    return parser


def _add_verb(
    verbs: argparse._SubParsersAction, name: str, metavar: str, what: str, help: str
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=help, description=help)
    verb.add_argument("target", metavar=metavar, help=what)
    verb.add_argument("overrides", metavar="key=value", nargs="*", help="settings that win over the recipe's")
    verb.add_argument("--debug", action="store_true", help="show a traceback with an error")
    return verb


def _report(debug: bool, message: str, code: int) -> int:
    if debug:
        traceback.print_exc()
    print(f"tputrain: {message}", file=sys.stderr, flush=True)
    return code


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # Until training begins, and takes this signal over, there is nothing to save.
    sys.exit(128 + number)
