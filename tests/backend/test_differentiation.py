"""Derivatives of every kind, and what wraps a model: torch.func, checkpoints, hooks, parametrizations."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

pytestmark = pytest.mark.usefixtures("no_fallback")


def _double(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to("tpu")


# ---- torch.func --------------------------------------------------------------------------------------------


def _network(x, weight):
    return torch.tanh(x @ weight).softmax(-1)


@pytest.mark.parametrize("transform", [jacrev, jacfwd, lambda f: hessian(lambda w: f(w).square().sum())])
def test_jacobians_are_the_cpus(transform):
    x, weight = _double(2, 3), _double(3, 2)
    actual = transform(lambda w: _network(x, w))(weight)
    expected = transform(lambda w: _network(x.cpu(), w))(weight.cpu())
    torch.testing.assert_close(actual.cpu(), expected)


def test_vectors_go_through_both_ways():
    x, weight = _double(2, 3), _double(3, 2)
    out, tangent = jvp(lambda w: _network(x, w), (weight,), (torch.ones_like(weight),))
    _, pull = vjp(lambda w: _network(x, w), weight)
    cotangent = _double(2, 2)
    torch.testing.assert_close((tangent * cotangent).sum(), pull(cotangent)[0].sum())
    assert out.is_tpu


def test_gradients_of_each_sample_are_the_same_as_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("tpu")
    parameters = {name: value.detach() for name, value in model.named_parameters()}
    inputs, labels = torch.randn(5, 3).to("tpu"), torch.tensor([0, 1, 1, 0, 1]).to("tpu")

    def loss(parameters, x, y):
        return nn.functional.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    together = vmap(grad(loss), (None, 0, 0))(parameters, inputs, labels)
    for sample in (0, 4):
        alone = grad(loss)(parameters, inputs[sample], labels[sample])
        for name, value in alone.items():
            torch.testing.assert_close(together[name][sample], value)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_randomness_under_vmap_is_as_asked(randomness):
    drawn = vmap(lambda row: torch.rand_like(row), randomness=randomness)(torch.zeros(3, 8, device="tpu"))
    assert torch.equal(drawn[0], drawn[1]) == (randomness == "same")


# ---- derivatives against differences -----------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False])
def test_gradcheck_agrees(fast):
    x, weight = _double(1, 3).requires_grad_(), _double(3, 2).requires_grad_()
    more = {} if fast else {"check_forward_ad": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(_network, (x, weight), fast_mode=fast, **more)


def test_gradgradcheck_agrees():
    x, weight = _double(1, 2).requires_grad_(), _double(2, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(_network, (x, weight), fast_mode=True)


def test_a_gradient_has_a_gradient():
    x = _double(3).requires_grad_()
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * 3 * x.detach() ** 2 * 6 * x.detach())


def test_dual_numbers_carry_tangents():
    x = _double(3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        _, tangent = forward_ad.unpack_dual(dual.sin() * 2)
        torch.testing.assert_close(tangent, 2 * x.cos())


# ---- checkpointing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_computes_the_same_again_dropout_included(reentrant):
    layers = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8), nn.Dropout(0.5)).to("tpu")
    results = []
    for use in (
        layers,
        lambda x: checkpoint(layers, x, use_reentrant=reentrant),
        lambda x: checkpoint_sequential(layers, 2, x, use_reentrant=reentrant),
    ):
        layers.zero_grad()
        torch.tpu.manual_seed(1)
        x = torch.ones(4, 8, device="tpu", requires_grad=True)
        out = use(x)
        out.square().sum().backward()
        drawn_afterwards = torch.rand(3, device="tpu")  # the generator goes on as if nothing had been done
        results.append([out, x.grad, *(p.grad.clone() for p in layers.parameters()), drawn_afterwards])
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(actual, expected)


# ---- hooks -------------------------------------------------------------------------------------------------


def test_hooks_of_tensors_modules_and_graphs_are_called():
    seen = []
    parameter = nn.Parameter(torch.ones(3, device="tpu"))
    parameter.register_hook(lambda gradient: gradient * 2)
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(("accumulated", p.grad.tolist())))
    middle = parameter * 3
    middle.retain_grad()
    middle.register_hook(lambda gradient: seen.append(("middle", gradient.tolist())))
    middle.grad_fn.register_prehook(lambda gradients: seen.append(("node", gradients[0].tolist())))
    middle.sum().backward()
    assert seen == [("middle", [1] * 3), ("node", [1] * 3), ("accumulated", [6] * 3)]
    assert middle.grad.tolist() == [1] * 3

    module = nn.Linear(2, 2, bias=False).to("tpu")
    module.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 10,))
    module.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].tolist()))
    x = torch.ones(1, 2, device="tpu", requires_grad=True)
    module(x).sum().backward()
    assert seen[-1] == [[10, 10]]


def test_an_optimizer_that_steps_in_hooks_frees_each_gradient():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to("tpu")
    before = [p.detach().clone() for p in model.parameters()]

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.ones(2, 3, device="tpu")).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_saved_tensors_go_to_the_host_and_back():
    x = _double(3).requires_grad_()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x * x * x).sum()
    y.backward()
    torch.testing.assert_close(x.grad, 3 * x.detach() ** 2)


def test_a_saved_tensor_that_was_overwritten_is_found():
    x = torch.ones(3, device="tpu", requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    y[0].add_(1)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"
    ):
        z.backward()


# ---- parametrizations --------------------------------------------------------------------------------------

WRAPPINGS = {
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "weight_norm of old": lambda: torch.nn.utils.weight_norm(nn.Conv1d(3, 3, 2)),
    "spectral_norm of old": lambda: torch.nn.utils.spectral_norm(nn.Linear(3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("name", WRAPPINGS)
def test_a_wrapped_weight_trains_as_on_the_cpu(name):
    models = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        models.append(WRAPPINGS[name]().to(device))
        optimizer = torch.optim.SGD(models[-1].parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            models[-1](torch.eye(3).to(device)).square().sum().backward()
            optimizer.step()
    for (key, expected), actual in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            actual.cpu(), expected, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: key + text
        )


def test_a_parametrization_of_ones_own_is_kept_by_a_copy():
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).t()

    module = nn.Linear(3, 3).to("tpu")
    nn.utils.parametrize.register_parametrization(module, "weight", Symmetric())
    copied = copy.deepcopy(module)
    symmetric = copied.weight.tolist()
    assert symmetric == module.weight.t().tolist()
    nn.utils.parametrize.remove_parametrizations(copied, "weight")
    assert copied.weight.is_tpu
    assert copied.weight.tolist() == symmetric


# ---- modules that swap -------------------------------------------------------------------------------------


def test_modules_move_by_swapping_tensors():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        module = nn.Linear(2, 2)
        weight = module.weight
        expected = weight.tolist()
        module.to("tpu")
        assert module.weight is weight
        assert weight.is_tpu
        assert weight.tolist() == expected
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
