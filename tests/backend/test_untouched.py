"""PyTorch beside us is what it was: nothing of it is replaced, and the CPU computes to the bit as ever."""

from tests.backend.fresh_process import run_python

# What PyTorch offers a device to register, and what that makes of the name "tpu".
REGISTERED = {
    "torch.ops.tpu",  # the namespace of operators of our own
    "torch.tpu",  # torch._register_device_module
    # torch.utils.rename_privateuse1_backend
    "torch._C._autograd.DeviceType.TPU",
    "torch._C._profiler.ProfilerActivity.TPU",
    # torch.utils.generate_methods_for_privateuse1_backend
    "torch.Tensor.is_tpu",
    "torch.Tensor.tpu",
    "torch.nn.modules.module.Module.tpu",
    "torch.nn.utils.rnn.PackedSequence.is_tpu",
    "torch.nn.utils.rnn.PackedSequence.tpu",
    "torch.storage.TypedStorage.is_tpu",
    "torch.storage.TypedStorage.tpu",
    "torch.storage._StorageBase.is_tpu",
    "torch.storage._StorageBase.tpu",
    # The c10d backend, and the recorded operators behind it.
    "torch.distributed.distributed_c10d.Backend.TPU",
    "torch.ops.tpu_collective",
}
# PyTorch's own: renaming its slot for a device names the members of these enumerations again.
RENAMED = {
    f"torch._C.{enumeration}.{member}"
    for enumeration in ("_autograd.DeviceType", "_profiler.ProfilerActivity")
    for member in ("__repr__", "__str__", "name")
}
# PyTorch has no way to register how a device's tensors are printed: see tpu_backend/printing.py.
# Nor does it say which meshes of ranks there are, or let a backend be a group's default one: see
# tpu_backend/distributed. Nor can a device choose an optimizer's form: see tpu_backend/torch_tpu/adam.py.
# And it compares a device's number by itself: see tpu_backend/distributed/local_rank.py.
# Inductor names its devices, and `backend="inductor"` asks no registry: see tpu_backend/compiled/dispatch.py.
REPLACED = {
    "torch._TorchCompileInductorWrapper.__call__",
    "torch._tensor_str._tensor_str",
    "torch.distributed.device_mesh.DeviceMesh.__init__",
    "torch.distributed.distributed_c10d._new_process_group_helper",
    "torch.distributed.distributed_c10d.init_process_group",
    "torch.distributed.init_process_group",
    "torch.nn.parallel.distributed.DistributedDataParallel.__init__",
    "torch.optim.adam._multi_tensor_adam",
}

SURVEY = """
    import inspect, sys
    import torch
    import torch._dynamo, torch.distributed, torch.optim, torch.profiler, torch.utils.data, torch.amp

    def survey():
        found = {}
        for module in [m for name, m in list(sys.modules.items()) if name.split(".")[0] == "torch"]:
            for name, value in list(vars(module).items()):
                found[f"{module.__name__}.{name}"] = value
                if inspect.isclass(value) and value.__module__.split(".")[0] == "torch":
                    for key, member in list(vars(value).items()):
                        found[f"{value.__module__}.{value.__qualname__}.{key}"] = member
        return found

    before = survey()
    import tpu_backend
    tpu_backend.register()
    model = torch.nn.Linear(2, 2).tpu()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.dropout(model(torch.ones(2, 2, device="tpu"))).sum().backward()
    optimizer.step()
    repr(model.weight)
    after = survey()
    simple = (int, float, str, bool, bytes, type(None), tuple, dict, list, set, frozenset)
    for name in sorted(before.keys() & after.keys()):
        if before[name] is not after[name] and not isinstance(before[name], simple):
            print("replaced", name)
    owners = {name.rsplit(".", 1)[0] for name in before}
    for name in sorted(after.keys() - before.keys()):
        owner, _, own = name.rpartition(".")
        if owner in owners and "tpu" in own.lower():
            print("added", name)
"""


def test_nothing_of_pytorch_is_replaced_that_is_not_listed_here():
    done = run_python(SURVEY, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 0, done.stderr
    replaced = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("replaced")}
    added = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("added")}
    assert replaced == REPLACED | RENAMED
    assert added == REGISTERED


CPU_WORK = """
    import hashlib, torch, torch.nn.functional as F
    if USED:
        torch.ones(2, device="tpu").add_(1).cpu()

    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, y = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        assert out.dtype == torch.bfloat16
        F.cross_entropy(out.float(), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16

    @torch.compile(backend=BACKEND, fullgraph=True)
    def step(x, weight):
        return F.softmax(x @ weight, dim=-1).sin().sum()

    weight = torch.randn(8, 4, requires_grad=True)
    loss = step(x, weight)
    loss.backward()
    expected = torch.autograd.grad(F.softmax(x @ weight, dim=-1).sin().sum(), weight)[0]
    torch.testing.assert_close(weight.grad, expected)
    values = [*model.parameters(), weight.grad, torch.rand(3), loss.detach()]
    print(hashlib.sha256(b"".join(v.detach().numpy().tobytes() for v in values)).hexdigest())
"""


def test_the_cpu_computes_the_same_to_the_bit_with_and_without_us():
    without = CPU_WORK.replace("USED", "False").replace("BACKEND", repr("inductor"))
    used = CPU_WORK.replace("USED", "True").replace("BACKEND", repr("inductor"))
    results = [run_python(without, TORCH_DEVICE_BACKEND_AUTOLOAD="0"), run_python(used)]
    assert [each.returncode for each in results] == [0, 0], results[0].stderr + results[1].stderr
    assert results[0].stdout == results[1].stdout
