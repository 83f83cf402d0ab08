"""Random numbers: the same bits in debug, strict and fused, alone or fused with whatever is near, from
one seed.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.backend.ways import WAYS, run_as


def _initial_values(initialize: Callable[[torch.Tensor], object]) -> Callable[[], torch.Tensor]:
    def draw() -> torch.Tensor:
        weight = torch.empty(8, 6, device="tpu")
        initialize(weight)
        return weight

    return draw


def _in_place(name: str, *args: float) -> Callable[[], torch.Tensor]:
    return lambda: getattr(torch.zeros(8, 6, device="tpu"), name)(*args)


DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "randn": lambda: torch.randn(8, 6, device="tpu"),
    "rand": lambda: torch.rand(8, 6, device="tpu"),
    "randint": lambda: torch.randint(-5, 100, (8, 6), device="tpu"),
    "randperm": lambda: torch.randperm(48, device="tpu"),
    "uniform_": _in_place("uniform_", -1.0, 3.0),
    "normal_": _in_place("normal_", 2.0, 0.3),
    "exponential_": _in_place("exponential_", 1.5),
    "bernoulli_": _in_place("bernoulli_", 0.3),
    "multinomial": lambda: torch.multinomial(torch.arange(1.0, 9, device="tpu"), 48, replacement=True),
    "multinomial without replacement": lambda: torch.multinomial(torch.ones(3, 8, device="tpu"), 6),
    "Dirichlet": lambda: torch._sample_dirichlet(torch.arange(1.0, 7, device="tpu").expand(8, 6)),
    "binomial": lambda: torch.binomial(torch.full((8, 6), 9.0, device="tpu"), torch.rand(6, device="tpu")),
    "dropout": lambda: nn.functional.dropout(torch.ones(8, 6, device="tpu"), 0.4),
    "kaiming_uniform_": _initial_values(nn.init.kaiming_uniform_),
    "trunc_normal_": _initial_values(nn.init.trunc_normal_),
    "Linear": lambda: nn.Linear(6, 8, device="tpu").weight.detach(),
    "Embedding": lambda: nn.Embedding(8, 6, device="tpu").weight.detach(),
}


def _seeded(draw: Callable[[], torch.Tensor], seed: int = 7) -> torch.Tensor:
    torch.tpu.manual_seed(seed)
    return draw().cpu()


@pytest.mark.parametrize("name", DRAWS)
def test_the_bits_are_the_same_in_every_mode(name):
    drawn = {}
    for way in WAYS:
        with run_as(way):
            drawn[way] = _seeded(DRAWS[name])
    for way in WAYS:
        assert torch.equal(drawn["debug"], drawn[way]), way
    assert drawn["debug"].float().std() > 0
    assert torch.equal(_seeded(DRAWS[name]), drawn["debug"])
    assert not torch.equal(_seeded(DRAWS[name], seed=8), drawn["debug"])


def _consumed(draw: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The draw, what an optimiser could contract it with, and a sum over it, all in one program."""
    drawn = draw()
    scaled = drawn * 2 + 1
    total = (drawn * drawn + scaled).sum()
    return drawn, scaled, total


@pytest.mark.parametrize(
    "name", ["randn", "rand", "uniform_", "normal_", "exponential_", "dropout", "Linear"]
)
def test_the_bits_are_the_same_fused_with_neighbours(name):
    alone = _seeded(DRAWS[name])
    torch.tpu.manual_seed(7)
    drawn, scaled, total = (tensor.cpu() for tensor in _consumed(DRAWS[name]))
    assert torch.equal(drawn, alone)
    # The consumer may be contracted into a fused multiply-add, the draw may not.
    torch.testing.assert_close(scaled, alone * 2 + 1, rtol=2e-7, atol=2e-7)
    torch.testing.assert_close(total, (alone * alone + alone * 2 + 1).sum())


@pytest.mark.parametrize("name", ["randn", "rand", "exponential_"])
def test_what_is_computed_from_a_draw_that_nobody_keeps_uses_the_same_bits(name):
    """Doubling is exact, so the draw can be read off the result although no program returns it."""
    alone = _seeded(DRAWS[name])
    assert torch.equal(_seeded(lambda: DRAWS[name]() * 2), alone * 2)
    assert torch.equal(_seeded(lambda: DRAWS[name]()[2:, ::2].t().neg()), -alone[2:, ::2].t())


def test_a_model_is_initialised_alike_in_every_mode():
    def model() -> nn.Module:
        torch.tpu.manual_seed(3)
        return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).apply(
            lambda layer: nn.init.normal_(layer.weight, std=0.02) if isinstance(layer, nn.Linear) else None
        )

    states = []
    for way in WAYS:
        with run_as(way), torch.device("tpu"):
            states.append({name: tensor.cpu() for name, tensor in model().state_dict().items()})
    for state in states[1:]:
        for name, tensor in states[0].items():
            assert torch.equal(state[name], tensor), name


def test_draws_follow_each_other_whatever_lies_between():
    torch.tpu.manual_seed(1)
    in_one_program = torch.stack([torch.randn(4, device="tpu") for _ in range(3)]).cpu()
    torch.tpu.manual_seed(1)
    one_by_one = torch.stack([torch.randn(4, device="tpu").cpu() for _ in range(3)])
    assert torch.equal(in_one_program, one_by_one)
    assert in_one_program.unique().numel() == 12


def test_a_new_seed_or_offset_compiles_nothing():
    def draw() -> list[float]:
        return torch.randn(5, device="tpu").mul(3).tolist()

    draw()
    before = torch.tpu.compile_stats()["compilations"]
    drawn = []
    for seed in (1, 2**40, -5):
        torch.tpu.manual_seed(seed)
        drawn += [draw(), draw()]
    assert torch.tpu.compile_stats()["compilations"] == before
    assert len({tuple(numbers) for numbers in drawn}) == 6


# ---- generators and their state ----------------------------------------------------------------------------


def test_torch_manual_seed_seeds_the_device():
    torch.manual_seed(11)
    assert torch.tpu.initial_seed() == 11
    first = torch.randn(4, device="tpu").cpu()
    torch.manual_seed(11)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), first)
    torch.tpu.manual_seed_all(11)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), first)


def test_rng_state_goes_round():
    torch.tpu.manual_seed(2)
    torch.randn(4, device="tpu")
    state = torch.tpu.get_rng_state()
    assert state.dtype == torch.uint8
    assert state.device.type == "cpu"
    drawn = [torch.randn(4, device="tpu").cpu() for _ in range(2)]
    torch.tpu.manual_seed(99)
    torch.tpu.set_rng_state(state)
    assert torch.equal(torch.tpu.get_rng_state(), state)
    assert all(torch.equal(torch.randn(4, device="tpu").cpu(), before) for before in drawn)
    torch.tpu.set_rng_state_all([state])
    assert torch.equal(torch.tpu.get_rng_state_all()[0], state)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), drawn[0])
    with pytest.raises(RuntimeError, match="uint8 CPU tensor of 16 bytes"):
        torch.tpu.set_rng_state(state[:8])


def test_a_generator_of_its_own():
    generator = torch.Generator("tpu")
    assert generator.device == torch.device("tpu", 0)
    generator.manual_seed(5)
    assert generator.initial_seed() == 5
    before = torch.tpu.get_rng_state()
    first = torch.randn(4, device="tpu", generator=generator).cpu()
    assert torch.equal(torch.tpu.get_rng_state(), before), "the default generator was used"
    state = generator.get_state()
    second = torch.randn(4, device="tpu", generator=generator).cpu()
    assert not torch.equal(first, second)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device="tpu", generator=generator).cpu(), second)
    cloned = generator.clone_state()
    assert torch.equal(
        torch.randn(4, device="tpu", generator=generator).cpu(),
        torch.randn(4, device="tpu", generator=cloned).cpu(),
    )
    torch.tpu.manual_seed(5)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), first), (
        "a generator with the default's seed differs"
    )
    assert generator.seed() == generator.initial_seed() != 5


def test_a_generator_of_another_device_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        torch.randn(4, device="tpu", generator=torch.Generator())
    ours = torch.Generator("tpu")
    for draw in (
        lambda: torch.randperm(4, generator=ours),  # as random_split and DataLoader call it
        lambda: torch.randn(4, generator=ours),
        lambda: torch.empty(4).uniform_(generator=ours),
        lambda: torch.empty(()).random_(generator=ours),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'cpu' device type for generator but found 'tpu'"):
            draw()


def test_default_generators_are_one_a_device():
    generators = torch.tpu.default_generators
    assert len(generators) == torch.tpu.device_count()
    assert [generator.device.index for generator in generators] == list(range(len(generators)))
    torch.tpu.manual_seed(21)
    assert generators[0].initial_seed() == 21
    with pytest.raises(IndexError, match=r"tpu:63 does not exist"):
        generators[63]


@pytest.mark.parametrize("devices", [None, [0]])
def test_fork_rng_gives_back_the_state(devices):
    torch.manual_seed(4)
    before, host_before = torch.tpu.get_rng_state(), torch.get_rng_state()
    with torch.random.fork_rng(devices, device_type="tpu"):
        inside = torch.randn(4, device="tpu").cpu()
        torch.randn(4)
        torch.manual_seed(123)
    assert torch.equal(torch.tpu.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), host_before)
    assert torch.equal(torch.randn(4, device="tpu").cpu(), inside)


def test_checkpointing_draws_the_same_dropout_again():
    weight = torch.ones(32, device="tpu", requires_grad=True)

    def layer(weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(weight, 0.5) * weight

    torch.tpu.manual_seed(6)
    result = torch.utils.checkpoint.checkpoint(layer, weight, use_reentrant=False)
    result.sum().backward()
    # d/dw of (w * mask * 2) * w at w = 1 is twice the output, where the mask is the same
    assert torch.equal(weight.grad.cpu(), 2 * result.detach().cpu())


def test_the_state_is_real_under_a_fake_tensor_mode():
    torch.tpu.manual_seed(9)
    with FakeTensorMode():
        state = torch.tpu.get_rng_state()
    assert type(state) is torch.Tensor
    assert torch.equal(state, torch.tpu.get_rng_state())
