"""The build steps that pyproject.toml cannot declare.

* `tpu_backend._C`, the C++ device layer: compiled from all of backend/csrc against the torch at hand, into
  the folder of that release of torch (tpu_backend/abi.py).
* What is needed to run: the torch that the extension was compiled for.
* recipes/ and configs/: copied into the wheel as `tputrain/shipped/`, so that `tputrain run llama` works in
  any directory.  An editable install needs no copy: it finds them at the top of the repository.
* A missing compiler or Python header: reported in one line, before any dependency is downloaded.
"""

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import Extension, find_namespace_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.dist_info import dist_info

# An older build of this very backend must not load itself into the process that compiles its successor.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError as error:
    raise SystemExit(
        f"tputrain: the build needs torch, and importing it failed ({error}); "
        "plain `pip install .` brings it, with --no-build-isolation install torch first"
    ) from None

ROOT = Path(__file__).resolve().parent
SOURCES = Path("backend") / "csrc"
JOINED = Path("build") / "joined"  # one place for all builds, so that ccache knows its files again
SHIPPED = ("recipes", "configs")  # top-level folders that the wheel carries in tputrain/shipped/
CXX_STANDARD = "-std=c++20"
COMPILERS = ("c++", "g++", "clang++")
CCACHE_FOLDERS = ("/usr/lib/ccache", "/usr/lib64/ccache")
PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
TORCH_RELEASE = ".".join(str(torch.__version__).split("+")[0].split(".")[:2])
EXTENSION = f"tpu_backend.extension.torch_{TORCH_RELEASE.replace('.', '_')}._C"

# The releases of torch that a wheel holds extensions for; .ci/build_wheel.py puts several into one.
TORCH_RELEASES = os.environ.get("TPUTRAIN_TORCH_RELEASES", TORCH_RELEASE).split()
DEPENDENCIES = [
    "jax>=0.10",
    "jaxlib>=0.10",
    "scipy",
    "numpy>=1.26",
    "safetensors>=0.5",
    "datasets>=3.0",
    "fsspec>=2024.2",
    "tokenizers>=0.21",
    "omegaconf>=2.3",
    "packaging>=22",
    "pyyaml>=6.0",
    "rich>=13.7",
    "shtab>=1.7",
    "wandb>=0.18",
]

# What to type, by the package manager that is found; all of them where none is.
INSTALL_COMPILER = {
    "apt-get": "`sudo apt-get install g++`",
    "dnf": "`sudo dnf install gcc-c++`",
}
INSTALL_HEADERS = {
    "apt-get": f"`sudo apt-get install python{PYTHON_VERSION}-dev`",
    "dnf": f"`sudo dnf install python{PYTHON_VERSION}-devel`",
}


def install_command(commands: dict[str, str]) -> str:
    found = [command for program, command in commands.items() if shutil.which(program)]
    return " or ".join(found[:1] or commands.values())


def first_program(folders: str | None = None) -> str | None:
    """The path of the first of COMPILERS in `folders` (default: the PATH)."""
    return next(filter(None, (shutil.which(name, path=folders) for name in COMPILERS)), None)


def find_compiler() -> str:
    """The C++ compiler's command: $CXX, else the first on the PATH, through ccache where it is installed."""
    chosen = os.environ.get("CXX")
    if chosen:
        if shutil.which(shlex.split(chosen)[0]) is None:
            raise SystemExit(f"tputrain: $CXX is {chosen!r}, which is not on the PATH; unset or correct it")
        return chosen
    on_path = first_program()
    if on_path is None:
        raise SystemExit(
            f"tputrain: no C++ compiler found (looked for $CXX and, on the PATH, {', '.join(COMPILERS)}); "
            f"install one: {install_command(INSTALL_COMPILER)}"
        )
    return first_program(os.pathsep.join(CCACHE_FOLDERS)) or on_path


def check_toolchain() -> str:
    """Return the compiler's command, or exit with one line that says what is missing and how to get it."""
    compiler = find_compiler()
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        raise SystemExit(
            f"tputrain: the C header of {sys.executable} is missing (no {include}/Python.h); "
            f"install it: {install_command(INSTALL_HEADERS)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <Python.h>\n#include <concepts>\n#include <span>\n")
        command = [*shlex.split(compiler), CXX_STANDARD, "-fsyntax-only", f"-I{include}", str(source)]
        probe = subprocess.run(command, capture_output=True, text=True)
    if probe.returncode != 0:
        reason = next((line for line in probe.stderr.splitlines() if "error" in line), probe.stderr.strip())
        raise SystemExit(
            f"tputrain: {compiler} cannot compile C++20, which GCC 11 and Clang 14 can ({reason}); "
            f"name a newer compiler in $CXX or install one: {install_command(INSTALL_COMPILER)}"
        )
    return compiler


class CheckedDistInfo(dist_info):
    """Metadata is asked for before any dependency is downloaded: the earliest moment to miss a compiler."""

    def run(self) -> None:
        check_toolchain()
        super().run()


class BuildDevice(BuildExtension):
    """Compiles EXTENSION and writes beside it what it was compiled for, for tpu_backend/abi.py."""

    def run(self) -> None:
        # In the environment, because torch's ninja file and setuptools' linker both read the compiler there.
        os.environ["CXX"] = check_toolchain()
        # In an editable install this is in the source folder, else in the folder that becomes the wheel.
        folder = Path(self.get_ext_fullpath(EXTENSION)).parent
        folder.mkdir(parents=True, exist_ok=True)
        (extension,) = self.extensions
        sources = extension.sources
        extension.depends = [*sources, *map(str, (ROOT / SOURCES).rglob("*.h"))]
        extension.sources = joined_by_folder(sources)
        try:
            super().run()
        finally:
            extension.sources = sources  # what an sdist is made of
        source_digest = runpy.run_path(str(ROOT / "backend" / "tpu_backend" / "abi.py"))["source_digest"]
        info = {
            "torch": str(torch.__version__),
            "python": PYTHON_VERSION,
            "sources": source_digest(ROOT / "backend" / "csrc"),
        }
        (folder / "_build_info.json").write_text(json.dumps(info, indent=2) + "\n")


def joined_by_folder(sources: list[str]) -> list[str]:
    """A source for each folder, which includes those in it: reading torch's headers is most of the work."""
    (ROOT / JOINED).mkdir(parents=True, exist_ok=True)
    joined = []  # written where they change: ninja would compile the others again
    for folder in sorted({Path(source).parent for source in sources}):
        own = [source for source in sources if Path(source).parent == folder]
        lines = [f'#include "{os.path.relpath(source, JOINED)}"' for source in own]
        path, text = JOINED / f"{'-'.join(folder.parts)}.cpp", "\n".join(lines) + "\n"
        if not (ROOT / path).exists() or (ROOT / path).read_text() != text:
            (ROOT / path).write_text(text)
        joined.append(str(path))
    return joined


class BuildPackages(build_py):
    """Copies the recipes and configs into the package, so that an installed one carries them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        shipped = Path(self.build_lib) / "tputrain" / "shipped"
        shutil.rmtree(shipped, ignore_errors=True)  # an earlier build may hold a recipe that is gone
        for folder in SHIPPED:
            for source in sorted((ROOT / folder).rglob("*.yaml")):
                target = shipped / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                self.copy_file(str(source), str(target))


def device_extension() -> Extension:
    # Warnings are for this project's code: -isystem silences them in the headers of torch and Python.
    system_headers = [*include_paths(), sysconfig.get_paths()["include"]]
    silenced = [flag for path in system_headers for flag in ("-isystem", path)]
    return CppExtension(
        EXTENSION,
        sorted(str(path.relative_to(ROOT)) for path in (ROOT / SOURCES).rglob("*.cpp")),
        include_dirs=[str(ROOT / SOURCES)],
        # -g0: with debug information of torch's headers the library would be ten times larger.
        extra_compile_args=[CXX_STANDARD, "-O2", "-g0", "-fvisibility=hidden", "-Wall", "-Wextra", *silenced],
    )


def package_names() -> list[str]:
    built = ["tpu_backend.extension*"]  # what an in-place build left: build_ext makes the wheel's own
    device = find_namespace_packages("backend", include=["tpu_backend", "tpu_backend.*"], exclude=built)
    trainer = find_namespace_packages(".", include=["tputrain", "tputrain.*"])
    return [name for name in (*device, *trainer) if "__pycache__" not in name]


def torch_requirement() -> str:
    """From the oldest release of TORCH_RELEASES up to the newest, patch releases included."""
    releases = sorted(tuple(map(int, release.split("."))) for release in TORCH_RELEASES)
    (oldest, minor), (newest, last) = releases[0], releases[-1]
    return f"torch>={oldest}.{minor},<{newest}.{last + 1}"


setup(
    packages=package_names(),
    install_requires=[torch_requirement(), *DEPENDENCIES],
    ext_modules=[device_extension()],
    cmdclass={"build_ext": BuildDevice, "build_py": BuildPackages, "dist_info": CheckedDistInfo},
)
