"""`tputrain doctor`: each thing that training needs, looked at by itself; what is wrong, how to mend it."""

import importlib
import os
import platform as machine
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from tputrain.announce import say


class UnwellError(Exception):
    """One line: the cause, then `; ` and what to do."""


@dataclass(frozen=True)
class Check:
    """Something that must hold. `look` returns what was found, or raises UnwellError."""

    name: str
    look: Callable[[], str]
    needs: tuple[str, ...] = ()
    """Checks without which this one can say nothing."""


def doctor() -> int:
    """Print a line a check; 1 where any failed."""
    failed: set[str] = set()
    for check in CHECKS:
        missing = [name for name in check.needs if name in failed]
        if missing:
            failed.add(check.name)
            _say("–", check.name, f"not looked at: it needs {missing[0]}")
            continue
        try:
            _say("ok", check.name, check.look())
        except UnwellError as unwell:
            failed.add(check.name)
            _say("FAIL", check.name, str(unwell))
    say("nothing is wrong" if not failed else "mend what FAILed, from the top, and look again")
    return 1 if failed else 0


def _say(verdict: str, name: str, line: str) -> None:
    say(f"{verdict:<5}{name:<11}{line}")


@contextmanager
def _blamed_on(fix: str) -> Iterator[None]:
    """Any exception inside becomes one line, with `fix` behind it unless the message says one itself."""
    try:
        yield
    except UnwellError:
        raise
    except Exception as error:
        cause = " ".join(str(error).split()) or "no message"
        raise UnwellError(f"{cause}; {fix}" if fix else cause) from None


def _python() -> str:
    return f"{machine.python_version()} on {machine.system()} {machine.machine()}, {sys.executable}"


def _torch() -> str:
    with _blamed_on("install it: pip install 'torch==2.13.*'"):
        # PyTorch loads every installed device package now; what ours has to say is asked for below.
        with redirect_stderr(StringIO()):
            try:
                import torch
            except RuntimeError as error:
                # PyTorch's own words name the package, and the variable that keeps such packages out.
                raise UnwellError(
                    f"{error} (it says: {error.__cause__}); uninstall that package, or set the variable and "
                    "import only one of the two"
                ) from None
        return str(torch.__version__)


def _jax() -> str:
    found = []
    for name in ("jaxlib", "jax"):
        with _blamed_on(f"install it: pip install '{name}>=0.10'"):
            module = importlib.import_module(name)
            found.append(f"{name} {getattr(module, '__version__', '?')}")
    return ", ".join(reversed(found))


def _extension() -> str:
    with _blamed_on("install it with `pip install .` in a checkout of tputrain"):
        import tpu_backend
    with _blamed_on(""):  # its own messages say what to do
        tpu_backend.register()
    return f"built for this torch, in {Path(str(tpu_backend.__file__)).parent}"


def _chip() -> str:
    with _blamed_on(""):
        from tpu_backend.runtime.platform import platform

        chosen = platform()
    return f"XLA on {chosen.name} ({chosen.reason})"


def _program() -> str:
    import torch

    with _blamed_on("run it with TPU_LOGS=compile for the program's text"):
        total = torch.arange(5, dtype=torch.float32).to("tpu").square().sum().item()
    if total != 30.0:
        raise UnwellError(f"0 + 1 + 4 + 9 + 16 came to {total}; run `pytest tests/backend` in a checkout")
    return "a first program compiles and gives the right number"


def _cache() -> str:
    from tputrain.data.config import TextConfig

    directory = Path(TextConfig.cache_dir).expanduser()
    return _written(directory, "tokenizers", "data.cache_dir=DIR")


def _programs() -> str:
    from tpu_backend.executable_cache import NONE, untrusted
    from tputrain.device import EXECUTABLE_CACHE

    named = os.environ.get("TPU_CACHE_DIR", EXECUTABLE_CACHE)
    if named in (NONE, ""):
        return f"TPU_CACHE_DIR={named}: compiled programs are not kept"
    directory = Path(named).expanduser().absolute()
    said = _written(directory, "compiled programs", "execution.executable_cache=DIR")
    if (problem := untrusted(directory)) is not None:
        raise UnwellError(f"{directory} is not used: {problem}: TPU_CACHE_DIR=DIR")
    return said


def _written(directory: Path, what: str, setting: str) -> str:
    """What there is to say of a directory that can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UnwellError(
            f"{directory} cannot be written ({error.strerror}), and {what} are kept there; "
            f"make it writable, or name another directory: {setting}"
        ) from None
    return f"{directory} can be written"


def _disk() -> str:
    free = os.statvfs(Path.cwd())
    num_bytes = free.f_bavail * free.f_frsize
    if num_bytes < 1e9:
        raise UnwellError(f"{num_bytes / 1e9:.2f} GB are free in {Path.cwd()}; free some for checkpoints")
    return f"{num_bytes / 1e9:,.0f} GB are free here"


CHECKS = (
    Check("python", _python),
    Check("torch", _torch),
    Check("jax", _jax),
    Check("extension", _extension, needs=("torch",)),
    Check("chip", _chip, needs=("torch", "jax", "extension")),
    Check("program", _program, needs=("extension", "chip")),
    Check("cache", _cache, needs=("torch",)),
    Check("programs", _programs, needs=("extension",)),
    Check("disk", _disk),
)
