"""PyTorch's optimizers and clipping on the device, in each of their implementations, against the CPU."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from tpu_backend import _C
from tpu_backend.runtime import segment
from tpu_backend.runtime.lists import list_length
from tpu_backend.runtime.signature import signature

STEPS = 3
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "plain": {"foreach": False},
    "fused": {"fused": True},
}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}),
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.fixture(scope="module")
def batch() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch.to(next(model.parameters()).device)).square().mean().backward()


def _parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in model.parameters()]


def _train(
    model: nn.Module, batch: torch.Tensor, device: str, kind: type[torch.optim.Optimizer], **options: Any
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    model = copy.deepcopy(model).to(device)
    optimizer = kind(model.parameters(), **options)
    for _ in range(STEPS):
        _gradients(model, batch)
        optimizer.step()
    return _parameters(model), optimizer.state_dict()["state"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_as_on_the_cpu(name, implementation, model, batch):
    kind, options = OPTIMIZERS[name]
    options = {**options, **IMPLEMENTATIONS[implementation]}
    expected, expected_state = _train(model, batch, "cpu", kind, **options)
    fallbacks = dict(torch.tpu.fallback_stats())
    actual, state = _train(model, batch, "tpu", kind, **options)
    assert torch.tpu.fallback_stats() == fallbacks
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for key, values in expected_state.items():
        for what, value in values.items():
            torch.testing.assert_close(
                torch.as_tensor(state[key][what]).cpu(), torch.as_tensor(value), rtol=1e-4, atol=1e-7
            )


@pytest.mark.parametrize("mode", ["debug", "strict"])
def test_the_default_adamw_steps_alike_in_the_other_modes(mode, model, batch):
    kind, options = OPTIMIZERS["AdamW"]
    expected, _ = _train(model, batch, "tpu", kind, **options)
    with torch.tpu.eager_mode(mode):
        actual, _ = _train(model, batch, "tpu", kind, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)


def _ops_of_a_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> int:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = torch.tpu.compile_stats()["ops_recorded"]
    optimizer.step()
    return torch.tpu.compile_stats()["ops_recorded"] - before


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_default_form_of_adam_is_one_operation(kind, capturable):
    """And one that counts, if the counts are on the device."""
    parameters = [nn.Parameter(torch.ones(3, device="tpu")) for _ in range(5)]
    optimizer = kind(parameters, capturable=capturable)
    assert _ops_of_a_step(optimizer, parameters) > 2  # it makes the state
    assert _ops_of_a_step(optimizer, parameters) == 1 + capturable
    counts = [optimizer.state[parameter]["step"] for parameter in parameters]
    assert [count.item() for count in counts] == [2] * 5
    assert {count.device.type for count in counts} == {"tpu" if capturable else "cpu"}


def test_elements_of_lists_that_differ_in_size_alone_are_traced_once(monkeypatch):
    traced, trace = {}, segment._traced

    def noted(entry):
        traced[entry.name] = list_length(entry)
        return trace(entry)

    monkeypatch.setattr(segment, "_traced", noted)
    sizes = [(13,), (14, 5), (17, 2), (1,)]
    parameters = [nn.Parameter(torch.ones(each, device="tpu")) for each in sizes]
    parameters.append(nn.Parameter(torch.ones(13, device="tpu", dtype=torch.bfloat16)))
    optimizer = torch.optim.AdamW(parameters)
    for _ in range(2):
        _ops_of_a_step(optimizer, parameters)
    some = [torch.ones(each, device="tpu") for each in (*sizes, 0)]
    torch._foreach_add_(some, some, alpha=3)
    assert traced["_fused_adamw"] == 2  # one of each dtype
    assert traced["_foreach_add.List"] == 2  # and the empty one


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_adamw_rounds_once(dtype):
    """In float32, or in the parameter's wider dtype."""
    kind, options = OPTIMIZERS["AdamW"]
    expected, actual = (
        nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype, device=device)) for device in ("cpu", "tpu")
    )
    for parameter, form in ((expected, {"fused": True}), (actual, {})):
        optimizer = kind([parameter], **options, **form)
        for _ in range(STEPS):
            parameter.grad = torch.full_like(parameter, 0.1)
            optimizer.step()
    torch.testing.assert_close(actual.cpu(), expected)


def test_the_default_adamw_counts_the_steps_of_each_parameter(model, batch):
    """A parameter without a gradient stays behind."""
    kind, options = OPTIMIZERS["AdamW"]
    results = []
    for device in ("cpu", "tpu"):
        moved = copy.deepcopy(model).to(device)
        optimizer = kind(moved.parameters(), **options)
        for step in range(STEPS):
            _gradients(moved, batch)
            if step == 1:
                moved[0].weight.grad = None
            optimizer.step()
        counts = [optimizer.state[parameter]["step"].item() for parameter in moved.parameters()]
        assert counts == [2, 3, 3, 3]
        results.append(_parameters(moved))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_the_default_adamw_steps_where_new_tensors_are_on_the_device(model, batch):
    kind, options = OPTIMIZERS["AdamW"]
    expected, _ = _train(model, batch, "tpu", kind, **options)
    with torch.device("tpu"):
        actual, _ = _train(model, batch, "tpu", kind, **options)
    torch.testing.assert_close(actual, expected)


def test_complex_parameters_step_over_lists(model):
    """And what PyTorch refuses stays refused."""
    results = []
    for device in ("cpu", "tpu"):
        parameter = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], device=device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, foreach=True)
        for _ in range(STEPS):
            parameter.grad = torch.full_like(parameter, 0.5 - 0.25j)
            before = torch.tpu.compile_stats()["ops_recorded"]
            optimizer.step()
            assert device == "cpu" or torch.tpu.compile_stats()["ops_recorded"] - before > 5
        results.append(parameter.detach().cpu())
    torch.testing.assert_close(results[1], results[0])
    with pytest.raises(ValueError, match="lr as a Tensor"):
        torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=True)


def test_a_state_dict_moves_from_cpu_to_tpu_and_back(model, batch):
    kind, options = OPTIMIZERS["AdamW"]
    host = copy.deepcopy(model)
    host_optimizer = kind(host.parameters(), **options)
    _gradients(host, batch)
    host_optimizer.step()
    device = copy.deepcopy(host).to("tpu")
    device_optimizer = kind(device.parameters(), **options)
    device_optimizer.load_state_dict(copy.deepcopy(host_optimizer.state_dict()))  # `step` is shared otherwise
    assert device_optimizer.state[next(device.parameters())]["exp_avg"].is_tpu
    for trained, optimizer in ((host, host_optimizer), (device, device_optimizer)):
        _gradients(trained, batch)
        optimizer.step()
    torch.testing.assert_close(_parameters(device), _parameters(host), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_norm(norm_type, foreach, model, batch):
    totals, gradients = [], []
    for device in ("cpu", "tpu"):
        moved = copy.deepcopy(model).to(device)
        _gradients(moved, batch)
        totals.append(nn.utils.clip_grad_norm_(moved.parameters(), 0.1, norm_type, foreach=foreach).cpu())
        gradients.append([parameter.grad.cpu() for parameter in moved.parameters()])
    torch.testing.assert_close(totals[1], totals[0])
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("foreach", [None, False])
def test_clipping_by_value(foreach, model, batch):
    gradients = []
    for device in ("cpu", "tpu"):
        moved = copy.deepcopy(model).to(device)
        _gradients(moved, batch)
        nn.utils.clip_grad_value_(moved.parameters(), 0.01, foreach=foreach)
        gradients.append([parameter.grad.cpu() for parameter in moved.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])
    assert max(gradient.abs().max() for gradient in gradients[1]) <= 0.01


def test_clipping_refuses_gradients_that_are_not_finite():
    parameter = nn.Parameter(torch.ones(3, device="tpu"))
    parameter.grad = torch.tensor([1.0, float("inf"), 1.0], device="tpu")
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_schedule_compiles_nothing_after_step_three(implementation, model, batch):
    """The learning rate, the momenta's corrections and the step count are inputs of the program."""
    moved = copy.deepcopy(model).to("tpu")
    kind, options = OPTIMIZERS["AdamW"]
    optimizer = kind(moved.parameters(), **options, **IMPLEMENTATIONS[implementation])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    batch = batch.to("tpu")
    before = None
    for step in range(10):
        if step == 3:
            torch.tpu.flush()
            before = torch.tpu.compile_stats()
        _gradients(moved, batch)
        nn.utils.clip_grad_norm_(moved.parameters(), 1.0 + step)
        optimizer.step()
        scheduler.step()
    torch.tpu.flush()
    after = torch.tpu.compile_stats()
    assert after["compilations"] == before["compilations"]
    assert after["segments_run"] - before["segments_run"] == 7
    assert after["host_reads"] == before["host_reads"]


def test_a_frozen_parameter_stays(model, batch):
    moved = copy.deepcopy(model).to("tpu")
    moved[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(moved.parameters(), lr=0.1)
    _gradients(moved, batch)
    optimizer.step()
    assert torch.equal(moved[0].weight.cpu(), model[0].weight)
    assert not torch.equal(moved[0].bias.cpu(), model[0].bias)


def test_list_operations_count_versions_as_on_the_cpu():
    def versions(device: str) -> list[int]:
        some, others = ([torch.ones(3, device=device), torch.ones(2, 2, device=device)] for _ in range(2))
        torch._foreach_add_(some, others)
        torch._foreach_mul_(some, 2.0)
        torch._foreach_addcdiv_([some[0][:1], some[0][1:]], [others[0][:1], others[0][1:]], [some[0][:1]] * 2)
        return [each._version for each in (*some, *others)]

    assert versions("tpu") == versions("cpu")


def _cut(whole: torch.Tensor) -> list[torch.Tensor]:
    return [whole[:4], whole[4:6].view(1, 2), whole[6:]]


def test_lists_of_parts_of_one_buffer_are_one_operation():
    """As gradients are that FSDP2 has scattered together, and DDP's in their bucket."""

    def results(device: str) -> list[torch.Tensor]:
        gradients, *of_adam = (torch.arange(12.0, device=device) * scale for scale in (1, 0.1, 0, 0))
        steps = [torch.ones((), device=device) for _ in range(3)]
        before = torch.tpu.compile_stats()["ops_recorded"]
        torch._foreach_mul_(_cut(gradients), 0.5)
        torch._foreach_add_(_cut(gradients), _cut(gradients), alpha=2)
        parameters, *moments = map(_cut, of_adam)
        torch._fused_adamw_(
            parameters, _cut(gradients), *moments, [], steps,
            lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        if device == "tpu":
            assert torch.tpu.compile_stats()["ops_recorded"] == before + 3
        return [each.cpu() for each in (gradients, *of_adam)]

    fallbacks = torch.tpu.fallback_stats()
    torch.testing.assert_close(results("tpu"), results("cpu"), rtol=1e-5, atol=1e-6)
    assert torch.tpu.fallback_stats() == fallbacks


def test_lists_whose_tensors_overlap_are_taken_in_turn():
    def results(device: str) -> torch.Tensor:
        whole = torch.arange(12.0, device=device)
        torch._foreach_add_([whole, whole], 1.0)
        torch._foreach_mul_([whole[:8], whole[4:]], 2.0)
        torch._foreach_add_([whole[:6], whole[6:]], [whole[6:], whole[:6]])  # reads what it has written
        torch._foreach_add_([whole[::2], whole[1::2]], [whole[1::2], whole[::2]])
        return whole.cpu()

    assert torch.equal(results("tpu"), results("cpu"))
    square, other = torch.arange(8.0, device="tpu").view(2, 2, 2)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        torch._foreach_add_([square, other], [square.t(), other.t()])


@pytest.mark.parametrize("operation", [torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_])
def test_a_fused_step_writes_gradients_only_where_it_unscales_them(operation):
    def results(device: str, **scale: torch.Tensor) -> tuple[list[torch.Tensor], int]:
        lists = [[torch.full((3,), value, device=device)] for value in (1.0, 8.0, 0.25, 0.5)]
        options = {"lr": 0.1, "weight_decay": 0.1, "maximize": False} | scale
        steps = [torch.ones((), device=device)]
        if operation is torch._fused_adamw_:
            operation(*lists, [], steps, beta1=0.9, beta2=0.99, eps=1e-8, amsgrad=False, **options)
        elif operation is torch._fused_sgd_:
            options |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
            operation(*lists[:3], **options)
        else:
            operation(*lists[:3], steps, lr_decay=0.0, eps=1e-8, **options)
        num_made = 0
        if device == "tpu":
            entry = signature(_C.recent_entries(_C.current_device())[0][-1])
            assert entry.overload.startswith("aten::_fused_")
            num_made = sum(not output.skip for output in entry.outputs)
        return [each[0].cpu() for each in lists], num_made

    plain, num_made = results("tpu")
    torch.testing.assert_close(plain, results("cpu")[0], rtol=1e-5, atol=1e-6)
    scaled, num_made_with_scale = results("tpu", grad_scale=torch.tensor(2.0, device="tpu"))
    torch.testing.assert_close(scaled, results("cpu", grad_scale=torch.tensor(2.0))[0], rtol=1e-5, atol=1e-6)
    assert scaled[1].tolist() == [4.0] * 3
    assert num_made_with_scale == num_made + 1


@pytest.mark.parametrize("foreach", [False, True])
def test_backward_through_weights_that_a_step_has_changed_is_refused(foreach):
    weight = torch.full((1,), 3.0, device="tpu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=foreach)
    loss = (weight * weight * torch.full((1,), 2.0, device="tpu")).sum()
    loss.backward(retain_graph=True)
    assert weight.grad.item() == 12
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad])
def test_a_state_that_was_loaded_onto_the_device_compiles_nothing(kind):
    """`map_location` moves the step counts, too, which PyTorch keeps on the host and reads in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to("tpu")
    x = torch.randn(2, 4).to("tpu")
    optimizer = kind(model.parameters(), lr=1e-2)

    def train() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.flush()

    def counts() -> tuple[int, int]:
        stats = torch.tpu.compile_stats()
        return stats["compilations"], stats["host_reads"]

    train()
    train()
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    train()
    train()
    expected = [each.detach().cpu() for each in model.parameters()]
    saved.seek(0)
    loaded = torch.load(saved, map_location="tpu")
    assert loaded["optimizer"]["state"][0]["step"].device.type == "tpu"
    optimizer = kind(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(loaded["optimizer"])
    model.load_state_dict(loaded["model"])
    del loaded
    torch.tpu.flush()  # what Adagrad made to begin with is no part of a step
    before, reads_before_steps = counts()
    train()
    train()
    compilations, host_reads = counts()
    assert compilations == before, list(map(str, torch.tpu.compilations()[-2:]))
    assert host_reads == reads_before_steps + len(expected)  # each count once, not in each step
    assert [each.tolist() for each in model.parameters()] == [each.tolist() for each in expected]
    assert optimizer.state[model[0].weight]["step"].item() == 4
