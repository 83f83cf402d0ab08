"""Activation checkpointing and bfloat16: the same training, in less memory or in half the width."""

import dataclasses
import gc

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tputrain.test_lora import QUERIES, SMALL, Batches
from tpu_backend.runtime import compiler
from tputrain import ExecutionConfig, LogConfig, OptimConfig, RunConfig, Trainer, TrainerConfig, UserError
from tputrain.execution import Execution
from tputrain.models import Llama, LlamaConfig, add_lora, initialize, recompute
from tputrain.models.config import LlamaModelConfig
from tputrain.models.recompute import recomputed, recomputed_call
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe


def gradients(
    recomputes: bool | str, device: str, lora: bool = False, autocast: bool = False
) -> dict[str, torch.Tensor]:
    initialize(
        model := Llama(dataclasses.replace(SMALL, activation_checkpointing=recomputes)),
        seed=0,
    )
    if lora:
        add_lora(model, QUERIES, seed=0)
    model.to(device)
    batch = {name: tensor.to(device) for name, tensor in Batches().batch_at(0, 0).items()}
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        loss = model(**batch)
    loss.backward()
    return {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("kind", ["layers", "products", "offload"])
@pytest.mark.parametrize(
    "variant", [{}, {"lora": True}, {"autocast": True}], ids=["plain", "lora", "autocast"]
)
def test_gradients_are_those_of_layers_computed_once(device, variant, kind):
    expected, ours = gradients(False, device, **variant), gradients(kind, device, **variant)
    assert ours.keys() == expected.keys()
    tolerance = {"atol": 1e-2, "rtol": 1e-1} if variant.get("autocast") else {"atol": 1e-6, "rtol": 1e-4}
    for name, gradient in expected.items():
        torch.testing.assert_close(
            ours[name], gradient, msg=lambda text, name=name: f"{name}: {text}", **tolerance
        )


class Records(nn.Module):
    """Remembers in which dtype its layer computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = self.layer(inputs)
        self.dtypes.add(output.dtype)
        return output


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize(("autocast", "dtype"), [(None, torch.float32), ("bfloat16", torch.bfloat16)])
def test_autocast_computes_in_bfloat16_and_keeps_weights_and_state_in_float32(device, autocast, dtype):
    model = Records()
    cfg = RunConfig(
        device=device,
        trainer=TrainerConfig(steps=3),
        optim=OptimConfig(learning_rate=0.1),
        execution=ExecutionConfig(autocast=autocast),
        log=LogConfig(progress="none"),
    )
    trainer = Trainer(model, cfg, train_loader=[(torch.ones(2, 4), torch.tensor([0, 1]))])
    trainer.fit()
    assert model.dtypes == {dtype}
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_another_autocast_is_refused():
    with pytest.raises(UserError, match=r"^execution\.autocast=float16: expected one of bfloat16"):
        ExecutionConfig(autocast="float16")


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_products_that_are_kept_are_computed_once(device):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    inputs = torch.ones(2, 4, requires_grad=True, device=device)
    counted = Counted()
    with counted:
        output = recomputed(layer, inputs, kind="products")
        num_forward = dict(counted.times)
        output.sum().backward()
    assert num_forward == {"addmm": 2, "tanh": 1}
    assert counted.times == {"addmm": 2, "tanh": 2}


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_products_of_experts_that_are_kept_are_computed_once(device):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 16, 16))

        def forward(self, x):
            ends = torch.tensor([3, 8], dtype=torch.int32, device=x.device)
            return torch.nn.functional.grouped_mm(x, self.weight, offs=ends).tanh()

    counted = Counted()
    with counted:
        output = recomputed(
            Experts().to(device), torch.ones(8, 16, requires_grad=True, device=device), kind="products"
        )
        num_forward = dict(counted.times)
        output.sum().backward()
    assert num_forward == {"_grouped_mm": 1, "tanh": 1}
    assert counted.times == {"_grouped_mm": 3, "tanh": 2}  # and two gradients


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.times: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("addmm", "tanh", "_grouped_mm"):
            self.times[name] = self.times.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def test_a_product_that_is_written_in_place_is_told():
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.layer(inputs).relu_()

    output = recomputed(Writes(), torch.ones(2, 4, requires_grad=True), kind="products")
    with pytest.raises(RuntimeError, match="written in place; take layers"):
        output.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "tpu"])
@pytest.mark.parametrize("kind", ["layers", "products", "offload"])
def test_second_derivatives_go_through_what_is_computed_again(device, kind):
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)

    def penalties(run):
        inputs = torch.linspace(-1, 1, 8, device=device).view(2, 4).requires_grad_()
        (gradient,) = torch.autograd.grad(run(inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [inputs, *layer.parameters()], allow_unused=True)

    expected = penalties(layer)
    found = penalties(lambda inputs: recomputed_call(layer, inputs, kind=kind))
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other)


@pytest.mark.parametrize("kind", ["layers", "products", "offload"])
def test_gradients_of_layers_do_not_stay(kind):
    layers = nn.ModuleList(nn.Sequential(nn.Linear(37, 37), nn.Tanh()) for _ in range(5))
    hidden = torch.ones(3, 37, requires_grad=True)
    output = hidden
    for layer in layers:
        output = recomputed_call(layer, output, kind=kind)
    loss = output.sum()
    loss.backward()
    gc.collect()
    alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.shape == (3, 37)]
    assert len(alive) <= 4  # the input, its gradient, the output: no layer's gradient


@pytest.mark.parametrize("device", ["cpu", "tpu"])
def test_what_a_layer_returns_and_takes_may_be_odd(device):
    layer = nn.Linear(4, 4).to(device)
    inputs = torch.ones(2, 4, device=device, requires_grad=True)
    named = recomputed_call(lambda x: {"none": None, "hidden": layer(x)}, inputs)
    named["hidden"].sum().backward()
    assert inputs.grad is not None
    empty = torch.ones(0, 4, device=device, requires_grad=True)
    recomputed(layer, empty).sum().backward()
    assert empty.grad.shape == (0, 4)

    class Ignores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(2, 4, device=device))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.bias * 2

    ignores = Ignores()
    recomputed(ignores, inputs).sum().backward()
    assert torch.equal(ignores.bias.grad.cpu(), torch.full((2, 4), 2.0))


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("product", "product"),
        ("layers,product", "layers,product"),
        (["layers", "product"], "['layers', 'product']"),
        ("", ""),
        ([], "[]"),
        (["layers", True], "['layers', True]"),
        (2, "2"),
    ],
)
def test_another_kind_is_refused(setting, shown):
    with pytest.raises(UserError) as caught:
        LlamaModelConfig(activation_checkpointing=setting)
    expected = (
        f"model.activation_checkpointing={shown}: expected one of true, false, layers, products, offload, "
        "or kinds that repeat over the layers, such as [layers, none]"
    )
    hint = "; did you mean products?" if "product" in shown else ""
    assert str(caught.value) == expected + hint


def test_more_kinds_than_layers_are_refused():
    with pytest.raises(UserError, match=r"=layers,none,none: expected at most 2, a kind for each layer$"):
        LlamaModelConfig(num_hidden_layers=2, activation_checkpointing="layers,none,none")


def _of_kinds(kinds):
    return dataclasses.replace(SMALL, num_hidden_layers=5, activation_checkpointing=kinds)


def test_kinds_repeat_over_the_layers():
    found = [layer.recomputes for layer in Llama(_of_kinds(["layers", "none", "products"])).model.layers]
    assert found == ["layers", "none", "products", "layers", "none"]
    config = LlamaModelConfig(activation_checkpointing=["layers", "none", "layers", "none"])
    assert config.activation_checkpointing == config.recomputes == "layers,none"
    assert LlamaModelConfig(activation_checkpointing="layers, layers").activation_checkpointing == "layers"
    assert LlamaModelConfig(activation_checkpointing="none").activation_checkpointing is False
    assert LlamaModelConfig(activation_checkpointing="layers,none,layers").recomputes == "layers,none,layers"


def _step(kinds, device):
    """The gradients on `device`, and the bytes that the forward pass keeps for the backward pass."""
    initialize(model := Llama(_of_kinds(kinds)), seed=0)
    model.to(device)
    batch = {name: tensor.to(device) for name, tensor in Batches().batch_at(0, 0).items()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor):
        kept[id(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(**batch)
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in kept.values())
    loss.backward()
    return [parameter.grad.cpu() for parameter in model.parameters()], num_bytes


@pytest.mark.parametrize("kinds", [["layers", "none"], ["none", "layers", "offload", "none"]])
def test_layers_of_several_kinds_have_the_same_gradients_to_the_bit_and_keep_less(kinds):
    (expected, most), (_, least) = _step(False, "cpu"), _step("layers", "cpu")
    found, between = _step(kinds, "cpu")
    assert all(map(torch.equal, found, expected))
    assert least < between < most
    # As many layers are kept whole as have the kind none; what they share counts once.
    num_whole = [layer.recomputes for layer in Llama(_of_kinds(kinds)).model.layers].count("none")
    assert between == pytest.approx(least + num_whole * (most - least) / 5, rel=0.01)


def test_layers_of_several_kinds_train_on_the_device_too():
    expected, found = _step(False, "tpu")[0], _step(["layers", "none", "products"], "tpu")[0]
    for ours, gradient in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, gradient, atol=1e-6, rtol=1e-4)


def test_recomputed_layers_save_memory_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU removes the barrier between the two computations of a layer, and would take them for one."""
    config = LlamaConfig(64, 128, 1024, 4, 2, 1, 64, 1024)
    ids = torch.randint(0, 64, (1, 1024))

    def temporaries(recomputes: bool | list[str]) -> int:
        model = Llama(dataclasses.replace(config, activation_checkpointing=recomputes)).to("tpu")
        monkeypatch.setattr(compiler, "_largest_temporary", 0)
        with torch.tpu.eager_mode("fused"):
            loss = model(ids.to("tpu"), ids.to("tpu"))
            loss.backward()
            loss.item()
        return torch.tpu.memory_stats()["executable_temp_bytes"]

    most, least = temporaries(False), temporaries(True)
    assert most > 1.5 * least
    assert least < temporaries(["layers", "none"]) < most


@pytest.mark.parametrize("run", [recomputed, recomputed_call])
def test_the_host_keeps_what_a_layer_is_computed_again_from(run, monkeypatch: pytest.MonkeyPatch) -> None:
    held, taken = [], []

    def held_by_host(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        return tensor * 2  # so that it shows in the gradient

    def taken_from_host(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken.append(len(tensors))
        return tensors

    monkeypatch.setattr(recompute, "held_by_host", held_by_host)
    monkeypatch.setattr(recompute, "taken_from_host", taken_from_host)
    layer = nn.Linear(3, 3, bias=False)
    inputs = torch.ones(2, 3, requires_grad=True)
    run(layer, inputs, kind="offload").sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 3), 4.0))
    assert len(held) == 1
    assert taken[0] == 2  # with the gradient of what the layer gives
    with torch.no_grad():
        run(layer, inputs, kind="offload")
    assert len(held) == 1


def test_a_run_whose_inputs_the_host_keeps_does_not_begin_in_parts() -> None:
    """Between programs they would be on the device."""
    for kind, form in (("offload", "fused"), (True, "parts")):
        model = Llama(dataclasses.replace(SMALL, activation_checkpointing=kind)).to("tpu")
        execution = Execution(model, torch.device("tpu"), ExecutionConfig(), lambda: 0, last_step=100)
        assert (execution._form_of("train") == "fused") == (form == "fused")


def test_layers_whose_inputs_the_host_keeps_train_under_torch_compile_too():
    """They are not compiled: torch.compile would keep their inputs on the device."""
    plain = gradients("offload", "tpu")
    model = Llama(dataclasses.replace(SMALL, activation_checkpointing="offload"))
    initialize(model, seed=0)
    batch = {name: tensor.to("tpu") for name, tensor in Batches().batch_at(0, 0).items()}
    torch.compile(model.to("tpu"))(**batch).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.cpu(), plain[name], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("form", "kinds"), [("compile", "offload"), ("strict", "none,offload")])
def test_the_host_keeps_inputs_within_one_program_alone(form, kinds):
    overrides = [f"model.activation_checkpointing={kinds}", f"execution.train={form}"]
    with pytest.raises(
        UserError,
        match=rf"activation_checkpointing={kinds}: expected layers or products with execution\.train={form}:",
    ):
        read_recipe(find_recipe("llama"), overrides)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("true", True),
        ("false", False),
        *((each, each) for each in ("layers", "products", "offload")),
        ("null", None),
        ("[layers, none]", "layers,none"),
        ("'layers,none'", "layers,none"),
    ],
)
def test_a_recipe_says_it_as_a_bool_or_as_a_kind(tmp_path, said, meant):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "include: [model/llama-5m, data/standard-library, optim/adamw]\n"
        f"model: {{activation_checkpointing: {said}}}\n"
    )
    for cfg in (
        read_recipe(recipe),
        read_recipe(find_recipe("llama"), [f"model.activation_checkpointing={said}"]),
    ):
        assert cfg.model.activation_checkpointing == meant
        assert bool(cfg.model.resolve().activation_checkpointing) == bool(meant)
