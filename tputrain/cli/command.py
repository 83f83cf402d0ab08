"""Arguments, exit codes, and which verb does what.

Exit codes: 0; 1 for a failure; 2 for a mistake of the user (one line, no traceback unless --debug); 130 and
143 after SIGINT and SIGTERM.
"""

import argparse
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import NoReturn, TextIO

from tputrain import signals
from tputrain.announce import announced, discard_unwritten, say, warn
from tputrain.cli.arguments import build_parser, verb_of
from tputrain.cli.early_mistakes import check_command
from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import RunFailedError, UserError, in_words
from tputrain.parallel.cluster import join_slurm_step
from tputrain.parallel.launched import end_with_launcher, record_error, speaks

_TIDYING_SECONDS = 3.0
_AGAIN_AFTER = 0.02  # seconds
_NO_OPTIONS = ("verb", "target", "overrides")  # among what is parsed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, or raises SystemExit where a signal ended its training."""
    chosen = _parse(arguments)
    with _leaving_until_training_begins():
        return _reported(chosen)


def _reported(chosen: argparse.Namespace) -> int:
    try:
        end_with_launcher()
        return _dispatch(chosen)
    except UserError as error:
        return _report(chosen.debug, str(error), code=2)
    except RunFailedError as error:
        return _report(chosen.debug, str(error), code=1)
    except (KeyboardInterrupt, signals.Terminated) as interrupt:
        code = 143 if isinstance(interrupt, signals.Terminated) else 130
        return _report(chosen.debug, _interrupted(chosen.verb), code)
    except BrokenPipeError:
        return 1  # the reader of our output (`| head`) has gone: nobody is left to tell
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        return _report(chosen.debug, f"{where}{in_words(error)} (--debug shows where)", code=1)
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        return _report(chosen.debug, f"{type(error).__name__}: {message} (--debug shows where)", code=1)
    finally:
        discard_unwritten()


def run() -> NoReturn:
    """`main`, and the end of the process."""
    try:
        code: object = main()
    except SystemExit as left:
        code = left.code
    except KeyboardInterrupt:  # before or behind what `main` takes care of
        warn("tputrain: interrupted")
        code = 130
    if isinstance(code, int) and (_is_compiling_ahead() or "tputrain.cli.plan" in sys.modules):
        # XLA cannot be interrupted, and a signal gives little time: nobody waits for threads that compile
        # what would come next. A plan has nothing to tidy up.
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)  # type: ignore[arg-type]


def _is_compiling_ahead() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and hasattr(torch, "tpu") and torch.tpu.is_compiling_ahead()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = build_parser()
    # argparse gives up on positional arguments after options; overrides may stand anywhere.
    chosen, rest = parser.parse_known_args(arguments)
    verb = verb_of(chosen.verb)
    for text in rest:
        if text.startswith("-"):
            options = [f"--{name.replace('_', '-')}" for name in vars(chosen) if name not in _NO_OPTIONS]
            hint = did_you_mean(nearest(text.partition("=")[0], options))
            parser.error(f"{text!r}: {verb.name} has no such option{hint}", verb.name)
    if not verb.takes_overrides and rest:
        parser.error(f"{rest[0]!r}: {verb.name} takes no such argument", verb.name)
    for option in verb.required:
        if getattr(chosen, option.removeprefix("--")) is None:
            parser.error(f"{verb.name} needs {option}", verb.name)
    if verb.takes_overrides:
        chosen.overrides += rest
        for text in chosen.overrides:
            if "=" not in text:
                parser.error(f"{text!r}: expected key=value, such as trainer.steps=1000")
    return chosen


def _dispatch(chosen: argparse.Namespace) -> int:
    # Imported only now, and only what the verb needs: some of it takes seconds, and the user waits.
    match chosen.verb:
        case "completion":
            import shtab

            print(shtab.complete(build_parser(), chosen.shell), flush=True)
            return 0
        case "cp":
            from tputrain.cli.recipe_copy import copy_recipe

            return copy_recipe(chosen.target, chosen.path)
        case "ls":
            from tputrain.cli.run_list import list_runs

            return list_runs(chosen.target)
        case "report":
            from tputrain.cli.report_file import write_report

            return write_report(chosen.targets, chosen.output)
        case "export":
            check_command(chosen)
            from tputrain.cli.hf_directory import export

            return export(chosen.target, chosen.out, chosen.format)
        case "sample" | "plan":
            # Standard output is the result alone, for a pipe or a file. Progress goes to standard error.
            output = sys.stdout
            with redirect_stdout(sys.stderr):
                return _with_torch(chosen, output)
        case "doctor":
            from tputrain.cli.doctor import doctor

            return doctor()
        case _:
            return _with_torch(chosen, sys.stdout)


def _with_torch(chosen: argparse.Namespace, output: TextIO) -> int:
    say(f"tputrain {chosen.verb} {chosen.target}")
    check_command(chosen)
    if chosen.verb in ("run", "resume"):
        join_slurm_step()
    with announced("loading PyTorch"), _leaving_at_once(chosen.verb):
        import torch  # noqa: F401

        from tputrain.cli import verbs

    match chosen.verb:
        case "run":
            return verbs.run(chosen.target, chosen.overrides)
        case "resume":
            return verbs.resume(chosen.target, chosen.overrides)
        case "validate":
            return verbs.validate(chosen.target, chosen.overrides)
        case "lr-find":
            from tputrain.cli.lr_find import lr_find
            from tputrain.lr_sweep import SweepConfig

            sweep = SweepConfig(chosen.lowest, chosen.highest, chosen.steps)
            return lr_find(chosen.target, chosen.overrides, sweep)
        case "plan":
            from tputrain.cli.plan import plan

            return plan(
                chosen.target,
                chosen.overrides,
                chosen.topology,
                output,
                chosen.json,
                chosen.compile,
                chosen.html,
                chosen.search,
            )
        case "import":
            from tputrain.cli.hf_import import import_directory

            return import_directory(chosen.target, chosen.out)
    from tputrain.cli.result import print_result
    from tputrain.sampling import printable

    text = verbs.sample(
        chosen.target, chosen.overrides, chosen.prompt, chosen.max_new_tokens, chosen.temperature, chosen.seed
    )
    print_result(printable(text), output)
    return 0


def _report(debug: bool, message: str, code: int) -> int:
    error = sys.exception()
    assert error is not None, "called while it is handled"
    if debug:
        traceback.print_exc()
    if not isinstance(error, signals.Terminated):  # sent by whoever started this process as one rank of many
        record_error(error)
    if speaks(message):
        print(f"tputrain: {message}", file=sys.stderr, flush=True)
    return code


def _interrupted(verb: str) -> str:
    return "interrupted before training began; nothing to save" if verb == "run" else "interrupted"


@contextmanager
def _leaving_at_once(verb: str) -> Iterator[None]:
    """SIGINT and SIGTERM end the process on the spot, which has made nothing so far.

    Raised inside an import, an exception may be swallowed (PyTorch's C++ tries whether NumPy can be imported,
    and takes it for a no): the run would go on, without NumPy.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        warn(f"tputrain: {_interrupted(verb)}")
        os._exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _leaving_until_training_begins() -> Iterator[None]:
    """SIGINT and SIGTERM end the command until training begins and takes them over: there is nothing to save,
    only to tidy up.
    """
    has_left = threading.Event()
    raised: list[BaseException] = []

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        threading.Thread(target=_insist, args=(number, has_left), daemon=True).start()
        raised.append(KeyboardInterrupt() if number == signal.SIGINT else signals.Terminated())
        raise raised[-1]

    def tell_unless_ours(unraisable: "sys.UnraisableHookArgs") -> None:
        # An exception does not leave a finalizer, or a callback of the garbage collector (JAX has one). So it
        # is raised once more, soon.
        if unraisable.exc_value in raised:
            number = signal.SIGINT if isinstance(unraisable.exc_value, KeyboardInterrupt) else signal.SIGTERM
            threading.Timer(_AGAIN_AFTER, os.kill, (os.getpid(), number)).start()
        else:
            previous_hook(unraisable)

    before = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    previous_hook, sys.unraisablehook = sys.unraisablehook, tell_unless_ours
    try:
        yield
    finally:
        has_left.set()
        sys.unraisablehook = previous_hook
        for number, handler in before.items():
            signal.signal(number, handler)


def _insist(number: int, has_left: threading.Event) -> None:
    """See to it that the process leaves, also where it is busy with one long thing, such as a compilation."""
    if number != signal.SIGINT:
        time.sleep(_TIDYING_SECONDS)
    elif has_left.wait(_TIDYING_SECONDS):
        return  # a notebook that called `main` goes on
    if signals.is_watching():
        os.kill(os.getpid(), number)  # training has begun meanwhile: it saves first
    else:
        os._exit(128 + number)
