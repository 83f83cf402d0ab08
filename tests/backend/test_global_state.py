"""PyTorch's global and thread-local state that can change a result is part of a program's key, or does not
matter. Another version of PyTorch, with state that is not in these lists, fails here.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.backend.ways import WAYS, run_as

Program = Callable[[torch.device], Sequence[Tensor]]
CPU, TPU = torch.device("cpu"), torch.device("tpu")


# ---- what there is -----------------------------------------------------------------------------------------

# What sets a part of it, and the settings below that flip it.
FLIPPED = {
    "_set_check_sparse_tensor_invariants": "sparse invariants",
    "_set_default_dtype": "default dtype",
    "_set_default_tensor_type": "default dtype",
    "_set_deterministic_algorithms": "deterministic",
    "_set_deterministic_fill_uninitialized_memory": "deterministic, unfilled",
    "_set_float32_matmul_precision": "matmul precision",
    "_set_fp32_precision_setter": "fp32_precision",
    "_set_fwd_grad_enabled": "forward gradients",
    "_set_grad_enabled": "gradients",
    "_set_math_sdp_allow_fp16_bf16_reduction": "attention in 16 bit",
    "_set_mkldnn_deterministic": "mkldnn",
    "_set_mkldnn_enabled": "mkldnn",
    "_set_multithreading_enabled": "autograd's threads",
    "_set_nnpack_enabled": "nnpack",
    "_set_onednn_allow_tf32": "mkldnn",
    "_set_sdp_priority_order": "attention",
    "_set_sdp_use_cudnn": "attention",
    "_set_sdp_use_fa3": "attention",
    "_set_sdp_use_flash": "attention",
    "_set_sdp_use_math": "attention",
    "_set_sdp_use_mem_efficient": "attention",
    "_set_sdp_use_overrideable": "attention",
    "_set_view_replay_enabled": "view replay",
    "set_anomaly_enabled": "anomaly",
    "set_autocast_cache_enabled": "autocast without a cache",
    "set_autocast_cpu_dtype": "autocast of the CPU",
    "set_autocast_cpu_enabled": "autocast of the CPU",
    "set_autocast_dtype": "autocast in float16",
    "set_autocast_enabled": "autocast",
    "set_flush_denormal": "flush denormals",
    "set_num_threads": "threads",
}

# What sets something that no result on this device depends on.
OF_OTHER_DEVICES = {
    "_set_blas_preferred_backend",
    "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_set_cublas_allow_fp16_accumulation",
    "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_set_cublas_allow_tf32",  # is torch.set_float32_matmul_precision
    "_set_cudnn_allow_tf32",
    "_set_cudnn_benchmark",
    "_set_cudnn_depthwise_kernel",
    "_set_cudnn_deterministic",
    "_set_cudnn_enabled",
    "_set_cpu_allow_fp16_reduced_precision_reduction",
    "_set_linalg_preferred_backend",
    "_set_miopen_immediate",
    "_set_qengine",
    "_set_rocm_fa_preferred_backend",
    "_set_sm_carveout_experimental",
    "set_autocast_gpu_dtype",
    "set_autocast_ipu_dtype",
    "set_autocast_ipu_enabled",
    "set_autocast_xla_dtype",
    "set_autocast_xla_enabled",
}
WARNS_OR_SHOWS = {
    "_set_autograd_fallback_mode",
    "_set_backcompat_broadcast_warn",
    "_set_backcompat_keepdim_warn",
    "_set_override_stale_capture_stream",
    "_set_print_stack_traces_on_fatal_signal",
    "_set_should_use_format_with_string_table",
    "_set_thread_name",
    "_set_throw_on_mutable_data_ptr",
    "_set_warnAlways",
    "_set_warn_deprecated_on_mutable_data_ptr",
    "_set_warn_on_accumulate_grad_stream_mismatch",
}
OF_PYTORCH_ITSELF = {  # what transforms and traces set while they are at work, above the device
    "_set_cached_tensors_enabled",
    "_set_default_mobile_cpu_allocator",
    "_set_dispatch_mode",
    "_set_dtensor_allow_implicit_replication",
    "_set_generator_metaclass",
    "_set_grad_layout_enforcement_enabled",
    "_set_graph_exec_group",
    "_set_graph_executor_optimize",
    "_set_meta_in_tls_dispatch_include",
    "_set_only_lift_cpu_tensors",
    "_set_skip_next_torch_function",
    "_set_torch_function_state",
    "_set_tracing_state",
    "_set_value_trace",
    "_set_worker_pids",
    "_set_worker_signal_handlers",
    "set_num_interop_threads",
}
OF_A_TENSOR = {"_set_conj", "_set_neg", "_set_tensor_metadata"}
KNOWN_SETTERS = set(FLIPPED) | OF_OTHER_DEVICES | WARNS_OR_SHOWS | OF_PYTORCH_ITSELF | OF_A_TENSOR

# Of torch 2.14 and 2.15: of kernels for CUDA, of fake tensors, and of who watches the making of a graph.
NEWER = {
    "_set_cublaslt_prefer_grouped_gemm",
    "_set_fake_constant",
    "_set_native_aot_enabled",
    "_set_native_aot_unconditional_masked",
    "_set_sdp_use_fa4",
    "allowNativeAot",
    "maskUnconditionalNativeAot",
    "node_creation_hooks_state_",
    "preferCublasltGroupedGemm",
    "userEnabledFA4SDP",
}

# Modules of torch.backends: the settings that flip what is in them, or None where that is of other devices.
BACKENDS = {
    "cpu": None,
    "cuda": "attention",  # the flags of scaled_dot_product_attention, and of CUDA's own
    "cudnn": None,
    "cusparselt": None,
    "kleidiai": None,
    "mha": "fast path",
    "miopen": None,
    "mkl": None,
    "mkldnn": "mkldnn",
    "mps": None,
    "nnpack": "nnpack",
    "openmp": None,
    "opt_einsum": "einsum",
    "python_native": None,  # kernels in Triton and CuTe, of other devices
    "quantized": None,
}

# at::Context's getters in C++ that no setter in Python says already: of other devices, or of no result.
ONLY_IN_CONTEXT = {
    "_SMCarveout_EXPERIMENTAL",
    "allowFP16AccumulationCuBLAS",
    "areVmapFallbackWarningsEnabled",
    "benchmarkLimitCuDNN",
    "overrideStaleCaptureStream",
    "releaseWeightsWhenPrepacking",
    "rocmAllowGroupGemmCk",
    "warnOnAccumulateGradStreamMismatch",
}
IN_CONTEXT = {
    "allowBF16ReductionCuBLAS",
    "allowFP16BF16ReductionMathSDP",
    "allowFP16ReductionCPU",
    "allowFP16ReductionCuBLAS",
    "allowTF32CuBLAS",
    "allowTF32CuDNN",
    "allowTF32OneDNN",
    "checkSparseTensorInvariants",
    "benchmarkCuDNN",
    "cudnnDepthwiseKernel",
    "deterministicAlgorithms",
    "deterministicAlgorithmsWarnOnly",
    "deterministicCuDNN",
    "deterministicFillUninitializedMemory",
    "deterministicMkldnn",
    "float32MatmulPrecision",
    "float32Precision",
    "immediateMiopen",
    "linalgPreferredBackend",
    "qEngine",
    "userEnabledCuDNN",
    "userEnabledCuDNNSDP",
    "userEnabledFA3SDP",
    "userEnabledFlashSDP",
    "userEnabledMathSDP",
    "userEnabledMemEfficientSDP",
    "userEnabledMkldnn",
    "userEnabledNNPACK",
    "userEnabledOverrideableSDP",
}
IN_AUTOGRAD_STATE = {
    "get_fw_grad_mode",
    "get_grad_layout_enforcement_enabled",
    "get_grad_mode",
    "get_graph_exec_group",
    "get_inference_mode",
    "get_multithreading_enabled",
    "get_view_replay_enabled",
}
OF_A_THREAD = {  # members of at::ThreadLocalState: modes and hooks act above the device, by calling it
    "autocast_dtypes_",
    "autograd_tls_",
    "debug_info_",
    "dispatch_key_",
    "dtensor_allow_implicit_replication_",
    "functionalization_reapply_views_state_",
    "functorch_tls_",
    "python_dispatcher_state_",
    "python_torch_function_state_",
    "rf_tls_",
    "saved_objects_",
    "saved_tensors_default_hooks_state_",
    "torch_dispatch_mode_state_",
}
IN_FUTURE = {
    "set_overwrite_module_params_on_conversion": "overwritten parameters",
    "set_swap_module_params_on_conversion": "swapped parameters",
}
IN_TORCH = {  # and what of torch._C they are, or the setting
    "set_anomaly_enabled",
    "set_autocast_cache_enabled",
    "set_autocast_cpu_dtype",
    "set_autocast_cpu_enabled",
    "set_autocast_dtype",
    "set_autocast_enabled",
    "set_autocast_gpu_dtype",
    "set_autocast_ipu_dtype",
    "set_autocast_ipu_enabled",
    "set_autocast_xla_dtype",
    "set_autocast_xla_enabled",
    "set_default_device",
    "set_default_dtype",
    "set_default_tensor_type",
    "set_deterministic_debug_mode",
    "set_float32_matmul_precision",
    "set_flush_denormal",
    "set_grad_enabled",
    "set_num_interop_threads",
    "set_num_threads",
    "set_printoptions",
    "set_rng_state",
    "set_warn_always",
    "use_deterministic_algorithms",
}


def header(name: str) -> str:
    return (Path(torch.__file__).parent / "include" / name).read_text()


def test_each_setter_of_pytorch_is_decided_on():
    setters = {name for name in dir(torch._C) if re.match(r"_?set_", name)}
    texts = {"_set_storage_access_error_msg", "_set_storage_data_ptr_access_error_msg"}  # with CUDA
    assert setters - texts - NEWER == KNOWN_SETTERS, (
        "new global state: decide whether a result can depend on it"
    )
    assert {name for name in dir(torch) if name.startswith(("set_", "use_"))} == IN_TORCH
    assert {name for name in dir(torch.__future__) if name.startswith("set_")} == set(IN_FUTURE)
    modules = {name for name, value in vars(torch.backends).items() if isinstance(value, ModuleType)}
    late = {"xnnpack"}  # there once something has imported it; kernels of the CPU for phones
    assert modules - {"sys", "torch", "types", "m"} - late == set(BACKENDS)
    named = {*FLIPPED.values(), *IN_FUTURE.values(), *filter(None, BACKENDS.values())}
    assert named <= set(SETTINGS)


def test_each_getter_of_pytorch_s_context_is_decided_on():
    context = header("ATen/Context.h")
    body = context[context.index("class TORCH_API Context") : context.index("struct TORCH_API NoTF32Guard")]
    getters = re.findall(r"^  [\w:<>]+ (\w+)\([^()]*(?:\([^()]*\))?[^()]*\) const;", body, re.MULTILINE)
    assert set(getters) - NEWER == IN_CONTEXT | ONLY_IN_CONTEXT
    of_autograd = re.findall(r" (get_\w+)\(\) const", header("c10/core/AutogradState.h"))
    assert set(of_autograd) == IN_AUTOGRAD_STATE
    of_thread = header("ATen/ThreadLocalState.h")
    private = of_thread[
        of_thread.index(" private:") : of_thread.index("class TORCH_API ThreadLocalStateGuard")
    ]
    assert set(re.findall(r"(\w+_)(?:\{.*\})?;", private)) - NEWER == OF_A_THREAD


# ---- what flips it -----------------------------------------------------------------------------------------


@contextmanager
def flipped(set_to: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    set_to(value)
    try:
        yield
    finally:
        set_to(back)


def attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return flipped(lambda to: setattr(owner, name, to), value, getattr(owner, name))


@contextmanager
def deterministic(fills: bool) -> Iterator[None]:
    with attribute(torch.utils.deterministic, "fill_uninitialized_memory", fills):
        with flipped(torch.use_deterministic_algorithms, True, False):
            yield


@contextmanager
def precisions(*places: str) -> Iterator[None]:
    """The newer way to say that products may be rounded to tf32 first."""
    with ExitStack() as stack:
        # PyTorch's own test helpers, which other tests import, freeze these flags.
        stack.enter_context(getattr(torch.backends, "__allow_nonbracketed_mutation")())
        for place in places:
            owner = (
                torch.backends if place == "generic" else importlib.import_module(f"torch.backends.{place}")
            )
            owner = getattr(owner, "matmul", owner)
            stack.enter_context(attribute(owner, "fp32_precision", "tf32"))
        yield


@contextmanager
def all_at_once(*managers: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for manager in managers:
            stack.enter_context(manager)
        yield


class Setting(NamedTuple):
    flip: Callable[[], AbstractContextManager[Any]]
    programs: str  # those that it may change
    tolerance: float | None = None  # of what is compared with the CPU; None: that of each dtype


_future = torch.__future__
SETTINGS = {
    "default dtype": Setting(
        lambda: flipped(torch.set_default_dtype, torch.float64, torch.float32), "numbers"
    ),
    "default device": Setting(lambda: torch.device("meta"), "product"),
    "deterministic": Setting(lambda: deterministic(True), "empty scatter product"),
    "deterministic, unfilled": Setting(lambda: deterministic(False), "scatter"),
    "matmul precision": Setting(
        lambda: flipped(torch.set_float32_matmul_precision, "medium", "highest"), "product", 2e-2
    ),
    "fp32_precision": Setting(lambda: precisions("mkldnn", "cuda", "generic"), "product attention", 2e-2),
    "gradients": Setting(torch.no_grad, "product"),
    "inference": Setting(torch.inference_mode, "product numbers"),
    "forward gradients": Setting(lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False), "product"),
    "autograd's threads": Setting(lambda: torch.autograd.set_multithreading_enabled(False), "backward"),
    "view replay": Setting(lambda: torch.autograd._force_original_view_tracking(True), "backward"),
    "anomaly": Setting(torch.autograd.detect_anomaly, "backward"),
    "attention": Setting(lambda: sdpa_kernel(SDPBackend.MATH), "attention"),
    "attention in 16 bit": Setting(
        lambda: flipped(torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp, True, False),
        "attention",
        2e-2,
    ),
    "autocast": Setting(lambda: all_autocast(torch.bfloat16), "product attention", 2e-2),
    "autocast in float16": Setting(lambda: all_autocast(torch.float16), "product", 2e-2),
    "autocast without a cache": Setting(
        lambda: all_autocast(torch.bfloat16, cache_enabled=False), "product backward", 2e-2
    ),
    "autocast of the CPU": Setting(lambda: torch.autocast("cpu", torch.bfloat16), "", 2e-2),
    "mkldnn": Setting(
        lambda: torch.backends.mkldnn.flags(
            enabled=False, deterministic=True, allow_tf32=False, fp32_precision="ieee"
        ),
        "product",
    ),
    "nnpack": Setting(lambda: torch.backends.nnpack.flags(enabled=False), "product"),
    "fast path": Setting(lambda: flipped(torch.backends.mha.set_fastpath_enabled, False, True), "encoder"),
    "einsum": Setting(lambda: torch.backends.opt_einsum.flags(enabled=False, strategy=None), "einsum"),
    "flush denormals": Setting(lambda: flipped(torch.set_flush_denormal, True, False), "product numbers"),
    "threads": Setting(lambda: flipped(torch.set_num_threads, 1, torch.get_num_threads()), "product"),
    "sparse invariants": Setting(torch.sparse.check_sparse_tensor_invariants, "sparse"),
    "overwritten parameters": Setting(
        lambda: flipped(_future.set_overwrite_module_params_on_conversion, True, False), "module"
    ),
    "swapped parameters": Setting(
        lambda: flipped(_future.set_swap_module_params_on_conversion, True, False), "module"
    ),
}


def all_autocast(dtype: torch.dtype, cache_enabled: bool = True) -> AbstractContextManager[None]:
    kinds = ("cpu", "tpu")
    return all_at_once(*(torch.autocast(kind, dtype, cache_enabled=cache_enabled) for kind in kinds))


# ---- what it may change ------------------------------------------------------------------------------------


def drawn(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)), device="cpu")
    return (values - 0.5).to(dtype).to(device)


def numbers(device: torch.device) -> list[Tensor]:
    integers = torch.arange(3, device=device)
    chosen = torch.ones(3, dtype=torch.bool, device=device)
    return [
        integers / 2,
        integers + 0.1,
        integers.sqrt(),
        integers > 1 / 3,
        torch.where(chosen, 0.1, 0.2),
        torch.full((2,), 0.1, device=device),
        torch.arange(0, 1, 0.3, device=device),
        torch.linspace(0, 1, 4, device=device),
        torch.scalar_tensor(0.1, device=device),
        torch.tensor([0.1, 0.2], device=device),
        torch.ones(2, device=device) * 1j,
        integers * 1j,
        *torch._foreach_mul([integers, integers + 1], 0.1),
        drawn(device, 3) * integers,
    ]


def product(device: torch.device) -> list[Tensor]:
    x, w = drawn(device, 5, 7), drawn(device, 7, 3)
    images, kernels = drawn(device, 2, 3, 6, 6), drawn(device, 4, 3, 3, 3)
    return [x @ w, F.linear(x, w.t()), F.conv2d(images, kernels), torch.einsum("ij,jk->ki", x, w)]


def einsum(device: torch.device) -> list[Tensor]:
    a, b, c = drawn(device, 3, 40), drawn(device, 40, 5), drawn(device, 5, 2)
    return [torch.einsum("ij,jk,kl->il", a, b, c)]


def backward(device: torch.device) -> list[Tensor]:
    x, w = drawn(device, 5, 7).requires_grad_(), drawn(device, 7, 3).requires_grad_()
    hidden = torch.sin(x @ w)
    hidden.view(15).narrow(0, 2, 9).mul_(2.0)
    (hidden.square().sum() / 2).backward()
    assert x.grad is not None
    assert w.grad is not None
    return [x.grad, w.grad]


def attention(device: torch.device) -> list[Tensor]:
    q, k, v = (drawn(device, 2, 3, 4, 8) for _ in range(3))
    half = [each.bfloat16() for each in (q, k, v)]
    return [
        F.scaled_dot_product_attention(q, k * 2, v, is_causal=True),
        F.scaled_dot_product_attention(*half),
    ]


def scatter(device: torch.device) -> list[Tensor]:
    x, at = drawn(device, 6, 2), torch.tensor([0, 2, 0, 1, 2, 2]).to(device)
    return [
        torch.zeros(3, 2, device=device).index_add(0, at, x),
        torch.zeros(3, 2, device=device).scatter_add(0, at[:, None].expand(6, 2), x),
        torch.zeros(3, 2, device=device).index_put((at,), x, accumulate=True),
        x.cumsum(0),
        torch.median(x, 0).values,
        F.interpolate(x[None, None], scale_factor=2.0, mode="bilinear"),
    ]


def empty(device: torch.device) -> list[Tensor]:
    """What nothing was written to is what PyTorch says in deterministic mode alone."""
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)
    made = [torch.empty(3, dtype=dtype, device=device) for dtype in kinds]
    made += [torch.empty_like(made[0].view(3, 1)), torch.empty_strided((2, 3), (1, 2), device=device)]
    made += [torch.empty_permuted((2, 3), (1, 0), device=device), made[0].new_empty(4)]
    grown = torch.ones(2, device=device)
    grown.resize_(5)
    return [*made, grown] if torch.are_deterministic_algorithms_enabled() else []


def sparse(device: torch.device) -> list[Tensor]:
    at = torch.tensor([[0, 1, 1], [2, 0, 0]]).to(device)
    return [torch.sparse_coo_tensor(at, drawn(device, 3), (2, 3)).coalesce().to_dense()]


def module(device: torch.device) -> list[Tensor]:
    layer = nn.Linear(3, 2, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(drawn(CPU, 2, 3))
        layer.bias.zero_()
    layer = layer.to(device).double().float()
    layer(drawn(device, 4, 3)).sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.device.type == device.type
    return [layer.weight.detach(), layer.weight.grad]


def encoder(device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, device="cpu").eval().to(device)
    with torch.no_grad():
        return [layer(drawn(device, 2, 5, 8))]


PROGRAMS: dict[str, Program] = {
    each.__name__: each
    for each in (
        numbers, product, einsum, backward, attention, scatter, empty, sparse, module, encoder
    )
}  # fmt: skip


def results(program: Program, device: torch.device) -> list[Tensor]:
    torch.tpu.flush()
    made = program(device)
    torch.tpu.flush()
    return [each.detach().cpu().clone() for each in made]


def bits(tensors: Sequence[Tensor]) -> list[tuple[torch.dtype, bytes]]:
    return [(each.dtype, each.reshape(-1).view(torch.uint8).numpy().tobytes()) for each in tensors]


CASES = [(name, each) for name, setting in SETTINGS.items() for each in setting.programs.split()]


@pytest.mark.parametrize(("name", "program"), CASES, ids=lambda value: value.replace(" ", "_"))
def test_a_setting_changes_what_it_changes_on_the_cpu_and_leaves_no_stale_program(name, program):
    setting, run = SETTINGS[name], PROGRAMS[program]
    before = results(run, TPU)
    for _ in range(2):
        with setting.flip():
            on_cpu, on_device = results(run, CPU), results(run, TPU)
        for found, expected in zip(on_device, on_cpu, strict=True):
            tolerance = (
                {} if setting.tolerance is None else {"atol": setting.tolerance, "rtol": setting.tolerance}
            )
            torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)
        num_compiled = torch.tpu.compile_stats()["compilations"]
        assert bits(results(run, TPU)) == bits(before), "as if it had never been flipped"
        assert torch.tpu.compile_stats()["compilations"] == num_compiled


@pytest.mark.parametrize("name", ["autocast of the CPU", "mkldnn", "nnpack", "threads", "flush denormals"])
def test_what_is_the_cpu_s_alone_changes_no_bit(name):
    programs = (product, numbers, attention)
    before = [bits(results(run, TPU)) for run in programs]
    with SETTINGS[name].flip():
        assert [bits(results(run, TPU)) for run in programs] == before


def test_numbers_too_small_for_a_normal_float_are_flushed_whatever_the_cpu_does():
    """XLA's programs always do so; what is only copied keeps its bits."""
    x = torch.tensor([1e-40, -3e-41, 1e-38]).to(TPU)

    def computed(_: torch.device) -> list[Tensor]:
        return [x.clone(), x * 0.5, x + x, x > 0, x.abs(), torch.where(x > 1, x, x * 1e30)]

    def with_numbers(_: torch.device) -> list[Tensor]:  # which the host converts
        return [F.threshold(x, 1e-41, 1e-41), F.pad(x, (1, 1), value=1e-40), x.clamp(min=1e-41)]

    before, before_with_numbers = bits(results(computed, TPU)), bits(results(with_numbers, TPU))
    with SETTINGS["flush denormals"].flip():
        assert bits(results(computed, TPU)) == before
        results(with_numbers, TPU)
    assert bits(results(with_numbers, TPU)) == before_with_numbers


@pytest.mark.parametrize("kind", ["deterministic", "default dtype", "matmul precision", "autocast"])
def test_a_captured_step_is_not_replayed_where_it_was_not_captured(kind):
    calls: list[int] = []

    @torch.tpu.capture
    def step(x: Tensor) -> Tensor:
        calls.append(1)
        return x @ x.t() + torch.arange(3, device=x.device) / 2

    x = drawn(TPU, 3, 4)
    for _ in range(3):
        plain = step(x)
    assert len(calls) == 2, "the third was a replay"
    with SETTINGS[kind].flip():
        again = step(x)
        assert len(calls) == 3
        assert again.dtype == (x.cpu() @ x.cpu().t() + torch.arange(3) / 2).dtype
    assert torch.equal(step(x), plain)


# ---- torch's default dtype, wherever a form of an operator is known again ----------------------------------


@pytest.fixture
def double() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    yield lambda: flipped(torch.set_default_dtype, torch.float64, torch.float32)
    torch.set_default_dtype(torch.float32)


def halves(device: torch.device) -> Tensor:
    return torch.arange(3, device=device) / 2


@pytest.mark.parametrize("way", WAYS)
def test_the_default_dtype_is_that_of_the_record(double, way):
    with run_as(way):
        single = halves(TPU)
        with double():
            wide, compared = halves(TPU), torch.arange(9, device=TPU) * 0.1 > 0.3
        narrow = halves(TPU)
    assert (single.dtype, wide.dtype, narrow.dtype) == (torch.float32, torch.float64, torch.float32)
    with double():
        assert torch.equal(compared.cpu(), torch.arange(9) * 0.1 > 0.3)
    assert torch.equal(wide.cpu(), torch.tensor([0, 0.5, 1], dtype=torch.float64))


def test_what_is_compared_with_a_number_is_compared_as_it_was_recorded(double):
    """The program is compiled when the default dtype is another one again."""
    large = 2**24 + 1
    integers = torch.tensor([large - 1, large, large + 1])
    on_device = integers.to(TPU)
    with double():
        expected = integers > large - 0.5
        recorded = on_device > large - 0.5
    assert torch.equal(recorded.cpu(), expected)


def test_the_default_dtype_tells_stored_forms_and_programs_apart(double):
    from tpu_backend import _C
    from tpu_backend.runtime.signature import signature

    def last_form() -> Any:
        halves(TPU)
        return signature(_C.recent_entries(0)[0][-1])

    single = last_form()
    with double():
        wide = last_form()
    assert single.overload == wide.overload
    assert single.digest != wide.digest, "by which known_forms.py and the keys of programs know it"
    assert (single.default_dtype, wide.default_dtype) == (torch.float32, torch.float64)
    assert last_form().digest == single.digest


def test_a_graph_of_torch_compile_has_the_default_dtype_it_was_made_with(double):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: (x / 2, x > 1 / 3), backend="tpu")
    x = torch.arange(3)
    for context, dtype in ((None, torch.float32), (double, torch.float64), (None, torch.float32)):
        with all_at_once(*(() if context is None else (context(),))):
            quotient, compared = compiled(x.to(TPU))
        assert quotient.dtype == dtype
        assert torch.equal(quotient.cpu(), (x / 2).to(dtype))
        assert compared.cpu().tolist() == [False, True, True]


def test_a_graph_fills_empty_tensors_where_pytorch_does():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda x: (torch.empty_like(x), x.new_empty(2, dtype=torch.int64)), backend="tpu"
    )
    x = torch.ones(3, device=TPU)
    compiled(x)
    with deterministic(True):
        values, integers = compiled(x)
    assert values.isnan().all()
    assert (integers == torch.iinfo(torch.int64).max).all()


def test_a_rehearsal_prepares_for_the_default_dtype_it_was_in(double):
    with double():
        with torch.tpu.rehearsal():
            halves(TPU).sqrt()
        prepared = halves(TPU).sqrt()
        assert prepared.dtype == torch.float64
        # On some CPUs PyTorch's square root is off in its last digit; Python's is rounded as IEEE 754 asks.
        assert prepared.cpu().tolist() == [math.sqrt(each) for each in halves(CPU).tolist()]
    assert halves(TPU).sqrt().dtype == torch.float32


def test_result_types_are_pytorch_s_under_any_default_dtype():
    from tpu_backend.runtime.dtypes import lowered_dtype
    from tpu_backend.runtime.signature import result_type

    tensors = [torch.ones(shape, dtype=dtype) for dtype in RESULT_DTYPES for shape in ((), (1,))]
    for default in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for tensor in tensors:
            for number in (True, 2, 2.5, 1j):
                with flipped(torch.set_default_dtype, default, torch.float32):
                    expected = torch.result_type(tensor, number)
                if str(expected) not in ("torch.complex32", "torch.bcomplex32"):  # which JAX lacks
                    assert result_type([tensor, number], default) == lowered_dtype(expected)


RESULT_DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.complex64,
)
