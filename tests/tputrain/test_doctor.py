"""`tputrain doctor`: breakages staged in fresh processes, each named with its cause and its fix."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.file_modes import obey_file_modes
from tpu_backend.abi import find_extension
from tputrain.cli.doctor import CHECKS, UnwellError

ROOT = Path(__file__).resolve().parents[2]
BACKEND = ROOT / "backend"


def doctor(
    home: Path, before: str = "", backend: Path = BACKEND, obeys_modes: bool = False, **environment: str
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and (verdict, line) of each check. `before` is run first, in the same process."""
    home.mkdir(exist_ok=True)
    # Nothing of this process's environment but what a shell has: PyTorch finds no device package to load.
    clean = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{backend}{os.pathsep}{ROOT}", "HOME": str(home)}
    clean |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{before}\nimport sys\nfrom tputrain.cli import main\nsys.exit(main(['doctor']))",
        ],
        capture_output=True,
        text=True,
        env=clean | environment,
        cwd=home,  # a checkout's own package information would be found before PYTHONPATH's
        preexec_fn=obey_file_modes if obeys_modes else None,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()[:-1]]
    return done.returncode, {name: (verdict, said) for verdict, name, said in rows}


def failed(rows: dict[str, tuple[str, str]]) -> list[str]:
    return [name for name, (verdict, _) in rows.items() if verdict == "FAIL"]


def test_a_machine_that_is_well(tmp_path):
    code, rows = doctor(tmp_path / "home", TPU_PLATFORM="cpu")
    assert code == 0, rows
    assert {verdict for verdict, _ in rows.values()} == {"ok"}
    names = ["python", "torch", "jax", "extension", "chip", "program", "cache", "programs", "disk"]
    assert list(rows) == names
    assert rows["chip"][1] == "XLA on cpu (TPU_PLATFORM=cpu)"


@pytest.fixture
def other_build(tmp_path) -> Path:
    """A backend whose extension was built for another torch."""
    shutil.copytree(BACKEND / "tpu_backend", tmp_path / "backend" / "tpu_backend")
    extensions = tmp_path / "backend" / "tpu_backend" / "extension"
    shutil.rmtree(extensions)
    shutil.copytree(find_extension(), extensions / "torch_2_9")
    return tmp_path / "backend"


def test_an_extension_built_for_another_torch(tmp_path, other_build):
    code, rows = doctor(tmp_path / "home", backend=other_build)
    assert code == 1
    assert failed(rows) == ["extension"]
    said = rows["extension"][1]
    assert "was built for torch 2.9 and met torch 2." in said
    assert ", or rebuild it in a source checkout: `pip install --no-build-isolation --no-deps .`" in said
    assert rows["program"] == ("–", "not looked at: it needs extension")


def test_no_jaxlib(tmp_path):
    code, rows = doctor(tmp_path / "home", before="import sys; sys.modules['jaxlib'] = None")
    assert code == 1
    assert failed(rows) == ["jax"]
    assert rows["jax"][1].endswith("; install it: pip install 'jaxlib>=0.10'")
    assert rows["chip"] == ("–", "not looked at: it needs jax")


def test_a_tpu_is_asked_for_and_there_is_none(tmp_path):
    hide_chips = "import tpu_backend.runtime.platform as platform; platform.tpu_chips = lambda: []"
    before = f"{hide_chips}; platform._open_devices = lambda name: (_ for _ in ()).throw(RuntimeError(name))"
    code, rows = doctor(tmp_path / "home", before=before, TPU_PLATFORM="tpu")
    assert code == 1
    assert failed(rows) == ["chip"]
    assert rows["chip"][1] == (
        "TPU_PLATFORM=tpu, but this machine shows no TPU chip (/dev/accel*, /dev/vfio/*); "
        "unset TPU_PLATFORM to run on the CPU"
    )


def install(site: Path, package: str, loads: str) -> Path:
    """A package whose entry point `import torch` calls, as if it were installed in `site`."""
    module = package.replace("-", "_")
    info = site / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\n{module} = {module}:load\n")
    (site / f"{module}.py").write_text(f"def load():\n    {loads}\n")
    return site


TAKES_THE_SLOT = "import torch; torch.utils.rename_privateuse1_backend('npu')"


def test_another_package_holds_pytorch_s_slot_for_devices(tmp_path):
    site = install(tmp_path / "site", "other-device", TAKES_THE_SLOT)
    path = os.pathsep.join(map(str, (site, BACKEND, ROOT)))
    code, rows = doctor(tmp_path / "home", PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert code == 1
    assert failed(rows) == ["extension"]
    said = rows["extension"][1]
    assert '"npu" holds it' in said
    assert "; uninstall that package, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said


def test_another_package_comes_after_ours_and_cannot_have_the_slot(tmp_path):
    """PyTorch's import fails then, by that package's exception: the line says whose it is."""
    ours = install(tmp_path / "ours", "first-device", "import tpu_backend; tpu_backend.register()")
    other = install(tmp_path / "other", "other-device", TAKES_THE_SLOT)
    path = os.pathsep.join(map(str, (ours, other, BACKEND, ROOT)))
    code, rows = doctor(tmp_path / "home", PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert code == 1
    assert failed(rows) == ["torch"]
    said = rows["torch"][1]
    assert "other_device" in said
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in said
    assert "; uninstall that package" in said


def test_a_cache_that_cannot_be_written(tmp_path):
    cache = tmp_path / "home" / ".cache"
    cache.mkdir(parents=True)
    cache.chmod(0o555)
    code, rows = doctor(tmp_path / "home", obeys_modes=True)
    assert code == 1
    assert failed(rows) == ["cache", "programs"]
    assert rows["cache"][1].startswith(f"{cache}/tputrain/data cannot be written (Permission denied)")
    assert rows["cache"][1].endswith("make it writable, or name another directory: data.cache_dir=DIR")
    said = rows["programs"][1]
    assert said.startswith(f"{cache}/tputrain/executables cannot be written (Permission denied)")
    assert said.endswith("make it writable, or name another directory: execution.executable_cache=DIR")


def test_programs_that_anybody_could_have_put_there_are_not_run(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setenv("TPU_CACHE_DIR", str(shared))
    (look,) = (check.look for check in CHECKS if check.name == "programs")
    with pytest.raises(UnwellError, match=r"by everybody; chmod go-w .*TPU_CACHE_DIR=DIR"):
        look()
    shared.chmod(0o755)
    assert look() == f"{shared} can be written"
    monkeypatch.setenv("TPU_CACHE_DIR", "none")
    assert look() == "TPU_CACHE_DIR=none: compiled programs are not kept"
