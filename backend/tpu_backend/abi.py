"""Which compiled extension fits the torch that is here: asked before it is loaded.

A C++ extension that meets another torch than it was compiled for dies with an undefined symbol, or worse,
runs.  So there is one for each release of torch, in a folder of its own:

    tpu_backend/extension/torch_2_13/_C.cpython-311-x86_64-linux-gnu.so
                                     _build_info.json      what setup.py compiled it for

`find_extension` compares that with this process, and raises one line that says what to do if nothing fits.
Nothing here imports the extension or JAX.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch


@dataclass(frozen=True)
class Build:
    """What an extension was compiled for, or what a process is."""

    torch: str  # as torch.__version__ has it: "2.13.0+cpu"
    python: str  # "3.11"
    sources: str | None = None  # `source_digest` of what was compiled

    @classmethod
    def of_this_process(cls) -> Build:
        return cls(
            torch=str(torch.__version__),
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
        )

    @property
    def torch_release(self) -> str:
        """The part of torch's version within which the C++ interface is stable: "2.13" of "2.13.0+cpu"."""
        return ".".join(self.torch.split("+")[0].split(".")[:2])


def source_digest(folder: Path) -> str:
    """A digest of the C++ sources in a folder: a checkout may be newer than the extension in it."""
    digest = hashlib.sha256()
    for file in sorted([*folder.rglob("*.cpp"), *folder.rglob("*.h")]):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def mismatch(built: Build, met: Build) -> str | None:
    """Why an extension built for `built` cannot be loaded in `met`; None when it can."""
    if built.python != met.python:
        return f"was built for Python {built.python} and met Python {met.python}"
    if built.torch_release != met.torch_release:
        return f"was built for torch {built.torch} and met torch {met.torch}"
    return None


def find_extension(package: Path | None = None) -> Path:
    """The folder of the extension that fits this process.

    ``package`` is the folder of tpu_backend; by default this one.  Raises ImportError, in one line, if no
    extension in it fits.
    """
    package = package or Path(__file__).resolve().parent
    here = Build.of_this_process()
    folder = package / "extension" / f"torch_{here.torch_release.replace('.', '_')}"
    info = folder / "_build_info.json"
    if not _is_built(folder):
        others = sorted(filter(_is_built, folder.parent.glob("torch_*")), key=_release_of)
        if others:
            releases = [".".join(map(str, _release_of(each))) for each in others]
            raise ImportError(
                f"tpu_backend's C++ extension was built for torch {' and '.join(releases)} and met torch "
                f"{here.torch}; install torch {' or '.join(releases)}, or {_rebuild(package)}"
            )
        raise ImportError(
            f"tpu_backend's C++ extension is not built (no _C* with _build_info.json in {folder}); "
            f"{_rebuild(package)}"
        )
    try:
        built = Build(**json.loads(info.read_text()))
    except (ValueError, TypeError) as error:
        raise ImportError(
            f"{info} does not say what the extension was built for ({error}); {_rebuild(package)}"
        ) from None
    reason = mismatch(built, here)
    if reason is None and not any((folder / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        found = ", ".join(sorted(path.name for path in folder.glob("_C*")))
        reason = f"({found}) is not for this interpreter, which loads *{EXTENSION_SUFFIXES[0]}"
    sources = package.parent / "csrc"  # there in a checkout: an editable install
    if reason is None and built.sources and sources.is_dir() and built.sources != source_digest(sources):
        reason = f"was built from other sources than {sources} has now"
    if reason is not None:
        raise ImportError(f"tpu_backend's C++ extension {reason}; {_rebuild(package)}")
    return folder


def _release_of(folder: Path) -> tuple[int, ...]:
    return tuple(map(int, folder.name.split("_")[1:]))


def _is_built(folder: Path) -> bool:
    return (folder / "_build_info.json").is_file() and any(folder.glob("_C*"))


def _rebuild(package: Path) -> str:
    checkout = package.parents[1]
    if (checkout / "setup.py").is_file():  # an editable install: the extension lies in the source tree
        return f"rebuild it: `pip install --no-build-isolation --no-deps -e {checkout}`"
    return "rebuild it in a source checkout: `pip install --no-build-isolation --no-deps .`"
