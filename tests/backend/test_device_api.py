"""The device under PyTorch's names: torch.tpu, torch.accelerator, and what a first use does."""

import copy
import os
from importlib.util import find_spec

import pytest
import torch

from tests.backend.fresh_process import ROOT, run_python

NAMES = [
    "is_available",
    "device_count",
    "current_device",
    "set_device",
    "device",
    "synchronize",
    "manual_seed",
    "manual_seed_all",
    "get_rng_state",
    "set_rng_state",
    "default_generators",
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "memory_stats",
    "mem_get_info",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "Stream",
    "Event",
    "stream",
    "current_stream",
    "is_bf16_supported",
    "eager_mode",
    "compile_stats",
    "fallback_stats",
    "flush",
]


@pytest.mark.parametrize("module", ["abi", "torch_tpu"])
def test_our_modules_may_be_imported_before_torch(module):
    code = f"import tpu_backend.{module}, torch; print(torch.ones(2, device='tpu').sum().item())"
    assert run_python(code).stdout.split()[-1] == "2.0"


def test_torch_tpu_has_the_names_of_a_device_module():
    assert [name for name in NAMES if not hasattr(torch.tpu, name)] == []


def test_devices_are_counted_and_chosen():
    assert torch.tpu.is_available()
    assert torch.tpu.device_count() >= 1
    torch.tpu.set_device(0)
    torch.tpu.set_device("tpu:0")
    assert torch.tpu.current_device() == 0
    with torch.tpu.device(0):
        assert torch.ones(2, device="tpu").device == torch.device("tpu", 0)
    with torch.tpu.device("tpu"), torch.tpu.device_of(torch.ones(2)):
        assert torch.tpu.current_device() == 0


@pytest.mark.parametrize(
    "use",
    [
        torch.tpu.set_device,
        torch.tpu.synchronize,
        torch.tpu.memory_allocated,
        torch.tpu.max_memory_allocated,
        torch.tpu.memory_stats,
        torch.tpu.mem_get_info,
        torch.tpu.get_device_properties,
        torch.tpu.get_rng_state,
        lambda index: torch.ones(2, device=f"tpu:{index}"),
        lambda index: torch.ones(2).to(f"tpu:{index}"),
    ],
)
def test_a_device_that_does_not_exist_is_named(use):
    with pytest.raises(RuntimeError, match=r"tpu:63 does not exist: there .* tpu device.*; .*LOCAL_RANK"):
        use(63)


def test_local_rank_names_the_device_of_a_launchers_process(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_RANK", "3")
    expected = torch.device("tpu", 0)
    torch.tpu.set_device(3)
    torch.accelerator.set_device_index(3)
    assert torch.tpu.current_device() == torch.accelerator.current_device_index() == 0
    assert torch.ones(2).to(3).device == torch.ones(2, device="tpu:3").device == expected
    assert torch.nn.Linear(2, 2).to("tpu:3").weight.device == expected
    with torch.device("tpu:3"):
        x = torch.arange(3.0) + torch.ones(3, device="tpu")
    assert x.device == expected
    assert x.to("tpu:3").tolist() == [1, 2, 3]
    drawn, expected_draw = (
        torch.rand(2, device=device, generator=torch.Generator(device).manual_seed(1))
        for device in ("tpu:3", "tpu")
    )
    assert drawn.tolist() == expected_draw.tolist()
    with torch.tpu.device(3), torch.accelerator.device_index(3):
        torch.tpu.synchronize("tpu:3")
        torch.accelerator.synchronize(3)
    torch.save(x, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt", map_location="tpu:3")
    assert loaded.device == expected
    assert loaded.tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match=r'tpu:2 does not exist: .*"tpu" or, by its LOCAL_RANK, "tpu:3"'):
        torch.ones(2, device="tpu:2")


def test_a_device_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="expected a tpu device, got cuda"):
        torch.tpu.synchronize("cuda")


def test_properties_tell_chip_platform_and_memory():
    properties = torch.tpu.get_device_properties("tpu:0")
    assert properties.name == torch.tpu.get_device_name()
    assert properties.platform in ("tpu", "cuda", "cpu")
    free, total = torch.tpu.mem_get_info()
    assert properties.total_memory == total
    assert 2**28 < free <= total
    assert torch.tpu.is_bf16_supported()
    assert torch.bfloat16 in torch.tpu.get_amp_supported_dtype()


def test_torch_accelerator_is_the_tpu():
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("tpu")
    assert accelerator.device_count() == torch.tpu.device_count()
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    with accelerator.device_index(0):
        accelerator.synchronize()
    accelerator.set_stream(accelerator.current_stream())
    assert accelerator.current_stream().device == torch.device("tpu", 0)
    assert accelerator.get_memory_info()[1] == torch.tpu.mem_get_info()[1]
    supported = accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} < supported
    assert torch.bits8 not in supported


def test_tensors_are_made_where_they_are_asked_for():
    expected = torch.device("tpu", 0)
    assert torch.ones(3, device="tpu").device == expected
    assert torch.ones(3, device=torch.device("tpu")).device == expected
    assert torch.ones(3).to("tpu").device == expected
    assert torch.ones(3).tpu().device == expected
    assert torch.ones_like(torch.ones(3).tpu()).device == expected
    with torch.device("tpu"):
        made = [torch.empty(3), torch.tensor([1.0, 2, 3]), torch.arange(3), torch.nn.Linear(2, 3).weight]
    torch.set_default_device("tpu")
    try:
        made += [torch.zeros(3), torch.rand(3), torch.eye(3)]
    finally:
        torch.set_default_device(None)
    assert all(tensor.device == expected for tensor in made)
    assert torch.zeros(3).device.type == "cpu"
    assert made[1].tolist() == [1, 2, 3]


def test_is_tpu_tells_tensors_modules_and_storages_apart():
    host, device = torch.ones(3), torch.ones(3).tpu()
    assert device.is_tpu
    assert not host.is_tpu
    assert device.untyped_storage().is_tpu
    assert not host.untyped_storage().is_tpu
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).tpu()
    assert all(tensor.is_tpu for tensor in [*module.parameters(), *module.buffers()])
    assert not any(tensor.is_tpu for tensor in module.cpu().parameters())


def test_storages_cross_the_border():
    host = torch.arange(4.0)
    storage = host.untyped_storage().tpu()
    assert storage.device.type == "tpu"
    assert torch.equal(
        torch.empty(0, device="tpu").set_(storage.clone()).cpu().view(torch.uint8), host.view(torch.uint8)
    )
    assert bytes(storage.cpu()) == bytes(host.untyped_storage())


def test_pinned_memory_is_asked_for_and_known():
    host = torch.arange(6.0).reshape(2, 3)
    pinned = host.pin_memory()
    assert pinned.is_pinned()
    assert pinned[1:].is_pinned()
    assert not host.is_pinned()
    assert torch.equal(pinned, host)
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.equal(pinned.to("tpu", non_blocking=True).cpu(), host)
    assert not torch.empty(0).pin_memory().numel()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.filterwarnings("error::UserWarning", "ignore:os.fork")
def test_a_pinning_data_loader_gives_pinned_batches(num_workers):
    data = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(4, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=2, pin_memory=True, num_workers=num_workers)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches).to("tpu").cpu(), torch.arange(8.0).reshape(4, 2))


def test_modules_copy_and_keep_their_device():
    module = torch.nn.Linear(2, 2).tpu()
    copied = copy.deepcopy(module)
    assert copied.weight.is_tpu
    with torch.no_grad():
        copied.weight.zero_()
    assert module.weight.abs().sum() > 0
    assert copied.weight.abs().sum() == 0


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="unknown eager mode 'lazy': expected one of debug, strict, fused"):
        torch.tpu.eager_mode("lazy")


def test_a_mode_is_set_for_good_or_for_a_while():
    assert torch.tpu.get_eager_mode() == "fused"
    with torch.tpu.eager_mode("strict"):
        assert torch.tpu.get_eager_mode() == "strict"
        with torch.tpu.eager_mode("debug"):
            assert torch.tpu.get_eager_mode() == "debug"
        assert torch.tpu.get_eager_mode() == "strict"
    torch.tpu.eager_mode("strict")
    assert torch.tpu.get_eager_mode() == "strict"
    torch.tpu.eager_mode("fused")
    assert torch.tpu.get_eager_mode() == "fused"


# ---- the first use -----------------------------------------------------------------------------------------


def test_import_and_cpu_work_start_nothing_and_first_use_says_one_line():
    done = run_python(
        """
        import sys, threading
        import torch
        assert torch.tpu.device_count() >= 1
        model = torch.nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()  # asks for the number of devices
        torch.manual_seed(3)
        assert "jax" not in sys.modules, "importing torch, or using the CPU, imported JAX"
        assert not torch.tpu.is_initialized()
        assert threading.active_count() == 1
        print("used now", file=sys.stderr)
        assert torch.ones(2, device="tpu").sum().item() == 2
        assert torch.tpu.is_initialized()
        """,
        TPU_PLATFORM="cpu",
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["used now", "device tpu → XLA:CPU (TPU_PLATFORM=cpu)"]


def test_compiling_cpu_code_starts_nothing():
    """On a TPU VM a script of the CPU's would take the chips from the run that trains."""
    done = run_python(
        """
        import sys
        import torch
        x = torch.arange(3.0)
        for options in {}, {"backend": "aot_eager"}:
            assert torch.equal(torch.compile(lambda x: 2 * x, **options)(x), 2 * x)
        assert "jax" not in sys.modules
        assert not torch.tpu.is_initialized()
        assert torch.accelerator.current_device_index() == 0
        assert not torch.tpu.is_initialized()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_backend_that_holds_the_name_leaves_import_torch_unharmed():
    done = run_python(
        """
        import os
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch
        torch.utils.rename_privateuse1_backend("npu")  # as another package would, loaded before this one
        import tpu_backend
        tpu_backend._autoload()
        assert not hasattr(torch, "tpu")
        assert torch.ones(2).sum().item() == 2
        """
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert 'one slot for an out-of-tree device and "npu" holds it' in done.stderr


def test_chips_that_somebody_holds_are_an_error_that_names_the_holder(tmp_path, monkeypatch):
    from tpu_backend.runtime import platform

    chip = tmp_path / "accel0"
    chip.touch()
    monkeypatch.setattr(platform, "tpu_chips", lambda: [chip])
    monkeypatch.delenv("TPU_PLATFORM", raising=False)
    expected = rf"TPU chips \(.*accel0\) that cannot be opened: process {os.getpid()} \(.*\) holds them"
    with chip.open(), pytest.raises(RuntimeError, match=expected):
        platform.platform.__wrapped__()
    with pytest.raises(RuntimeError, match="no holder could be found in /proc"):
        platform.platform.__wrapped__()


def test_a_gpu_that_nobody_asked_for_is_named(monkeypatch):
    from tpu_backend.runtime import platform

    monkeypatch.setattr(platform, "tpu_chips", list)
    monkeypatch.setattr(platform, "has_nvidia_gpu", lambda: True)
    monkeypatch.delenv("TPU_PLATFORM", raising=False)
    found = platform.platform.__wrapped__()
    assert found.name == "cpu"
    assert found.reason == "no TPU found; TPU_PLATFORM=cuda takes this machine's GPU"


def test_a_platform_that_cannot_be_had_is_one_clear_line():
    done = run_python(
        """
        import os
        import torch
        for platform in ("gpu", "gpu", "tpu", "tpu"):  # a second use says the same as the first
            os.environ["TPU_PLATFORM"] = platform
            try:
                torch.ones(2, device="tpu")
            except RuntimeError as error:
                print(str(error).strip())
        assert torch.ones(2).sum().item() == 2
        """,
        TPU_PLATFORM="gpu",
    )
    assert done.returncode == 0, done.stderr
    unknown, again, missing, again_missing = done.stdout.splitlines()
    assert unknown == again == "TPU_PLATFORM='gpu': expected one of auto, tpu, cuda, cpu"
    assert missing == again_missing
    assert missing.startswith("TPU_PLATFORM=tpu, but this machine shows no TPU chip")
    # libtpu, where it is installed, complains here itself: it was asked to open chips that are not there.
    assert find_spec("libtpu") is not None or done.stderr == ""
    assert "device tpu" not in done.stderr
    assert "Traceback" not in done.stderr


def test_an_installed_tpu_runtime_is_left_closed_where_there_is_no_chip(tmp_path):
    """JAX would open it, search for chips and print errors; this stand-in cannot be opened."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "__init__.py").write_text(
        "def configure_library_path(): pass\ndef get_library_path(): return '/no/libtpu.so'\n"
    )
    done = run_python(
        """
        import jax, torch
        print(torch.ones(3, device="tpu").sum().item(), jax.config.jax_platforms)
        """,
        PYTHONPATH=os.pathsep.join([str(ROOT / "backend"), str(ROOT), str(tmp_path)]),
    )
    assert done.stdout.split() == ["3.0", "cpu"], done.stderr
    assert done.stderr.splitlines() == ["device tpu → XLA:CPU (no TPU found)"]
