"""Sizes that grow, without gradients: two sizes show what grows, and one program serves those after them."""

import math
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.backend.fresh_process import run_python

SIZES = (9, 10, 11, 17, 30)  # the second is longer by one: it is padded already
JUMPS = (9, 12, 15, 17, 30)


@pytest.fixture(autouse=True)
def padding():
    """As in a process that has seen no size yet."""
    torch.tpu.init()
    from tpu_backend.padded import serving  # comes with the runtime

    torch.tpu.synchronize()  # what other tests left is no part of the first segment
    serving._classes.clear()
    with torch.tpu.pad_sizes(True):
        yield


def compiled_by(function, inputs, sizes=SIZES) -> list[int]:
    """Programs that each size compiled; results are the CPU's."""
    counts = []
    for size in sizes:
        before = torch.tpu.compile_stats()["compilations"]
        with torch.no_grad():
            given = inputs(size)
            theirs = function(*given)
            ours = function(*(each.to("tpu") for each in given))
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)
        counts.append(torch.tpu.compile_stats()["compilations"] - before)
    return counts


def rows(size: int) -> list[Tensor]:
    """Numbers whose neighbours in a padded program, zeros, give inf and NaN in what is computed of them."""
    torch.manual_seed(size)
    return [torch.rand(size, 6) + 0.5]


# What meets along the size that grows, behind an operation that makes NaN or inf of what was padded.
MEETS = {
    "sum": lambda x: (1 / x).sum(0),
    "mean": lambda x: x.log().mean(0),
    "variance": lambda x: (1 / x).var(0),
    "maximum": lambda x: (1 / x).amax(0) + (-1 / x).amin(),
    "argmax": lambda x: (1 / x).argmax(0),
    "softmax": lambda x: (1 / x).softmax(0).sum(0),
    "contraction": lambda x: (1 / x).t() @ x.log(),
    "scores": lambda x: ((x @ x.t()) / x.sum(1)).softmax(-1) @ (1 / x),
    "cumulative": lambda x: (1 / x).cumsum(0)[-1],
    "sorted": lambda x: (1 / x).sort(stable=True, dim=0).values[-3:],
    "largest": lambda x: (1 / x).topk(3, 0).indices,
    "joined": lambda x: torch.cat([1 / x, x[:2]]).sum(0),
    "last": lambda x: (1 / x)[-1] + x[1:].sum(0) + x[:-1].sum(0),
    "flipped": lambda x: (1 / x).flip(0)[0],
    "causal": lambda x: F.scaled_dot_product_attention(x[None], x[None], 1 / x[None], is_causal=True)[0, -1],
    "places": lambda x: (torch.arange(x.shape[0], device=x.device)[:, None] * x).sum(0),
    "any": lambda x: (1 / x).isnan().any(0),
    "convolved": lambda x: F.conv1d(1 / x.t()[None], x.new_ones(2, 6, 3), padding=2, dilation=2).sum(2),
    "batch": lambda x: F.conv1d(1 / x[:, :, None].expand(-1, 6, 4), x.new_ones(3, 6, 3)).mean((0, 2)),
    "stacked": lambda x: torch.stack([1 / x, x.log()], -1).flatten(1).sum(0),
    "repeated": lambda x: (1 / x).repeat(3, 1).view(3, -1, 6).sum(1),
    "as often": lambda x: (1 / x[:2]).repeat(x.shape[0], 1).sum(0),
    "picked": lambda x: x[[-1]] * F.pad(1 / x, (0, 0, 0, 2)).sum(0),
}


@pytest.mark.parametrize("name", MEETS)
def test_what_meets_along_a_size_is_masked(name):
    assert compiled_by(MEETS[name], rows) == [1, 1, 0, 0, 0]


def test_the_loss_of_a_batch_of_texts_is_padded():
    torch.manual_seed(0)
    table = {"cpu": torch.rand(50, 8)}
    table["tpu"] = table["cpu"].to("tpu")

    def loss(x: Tensor, y: Tensor) -> Tensor:
        own = table[x.device.type]
        return F.cross_entropy(F.linear(own[x], own).flatten(0, 1), y.flatten())

    def texts(size: int) -> list[Tensor]:
        torch.manual_seed(size)
        return [torch.randint(50, (4, size)) for _ in range(2)]

    assert compiled_by(loss, texts) == [1, 1, 0, 0, 0]


def test_sizes_that_jump_are_padded_from_the_third_on():
    assert compiled_by(lambda x: (1 / x).sum(0).sqrt(), rows, JUMPS) == [1, 1, 1, 0, 0]


def test_sizes_that_shrink_are_padded_from_the_third_on():
    assert compiled_by(lambda x: (1 / x).sum(0).sin(), rows, (30, 29, 28, 20)) == [1, 1, 1, 0]


def test_a_size_that_comes_again_is_no_new_program():
    assert compiled_by(lambda x: (1 / x).sum(0).cos(), rows, (9, 10, 9, 10, 11)) == [1, 1, 0, 0, 0]


def test_what_a_tensor_is_filled_with_is_an_input():
    def flagged(x: Tensor) -> Tensor:
        return (1 / x).sum(0) + torch.full((1,), x.shape[0] == 17, device=x.device)

    assert compiled_by(flagged, rows) == [1, 1, 0, 0, 0]


def test_what_is_not_proven_is_compiled_for_each_size():
    def draws(x: Tensor) -> Tensor:
        return F.dropout(x, 0.0) * torch.zeros_like(x).uniform_(1, 1)

    assert compiled_by(draws, rows) == [1] * len(SIZES)


def test_sizes_that_are_equal_at_first_may_grow_apart():
    """Where they are alike later, the call is none of the family of the first two."""
    for first, second in ((8, 8), (9, 10), (10, 10), (11, 14), (12, 12)):
        with torch.no_grad():
            made = [torch.ones(size, device="tpu").sum() for size in (first, second)]
        assert [each.item() for each in made] == [first, second]


def test_lists_of_parts_of_one_buffer_are_not_padded():
    def update(x, whole):
        whole = whole.clone()
        torch._foreach_mul_([whole[:4], whole[4:]], 3.0)
        return whole * x.sum()

    assert compiled_by(update, lambda size: [*rows(size), torch.arange(8.0)]) == [1, 1, 1, 1, 1]


def test_gradients_and_deterministic_algorithms_are_not_padded():
    def with_gradients(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return (x * 3).sum(0)

    assert compiled_by(with_gradients, rows) == [1] * len(SIZES)
    torch.use_deterministic_algorithms(True)
    try:
        assert compiled_by(lambda x: (x * x).sum(1), rows) == [1] * len(SIZES)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_padded_where_it_is_switched_off():
    with torch.tpu.pad_sizes(False):
        assert not torch.tpu.get_pad_sizes()
        assert compiled_by(lambda x: (1 / x).sum(0) * 3, rows) == [1] * len(SIZES)
    assert torch.tpu.get_pad_sizes()


def test_a_padded_program_serves_no_longer_once_it_is_switched_off():
    def function(x: Tensor) -> Tensor:
        return (1 / x).sum(0).tanh()

    assert compiled_by(function, rows) == [1, 1, 0, 0, 0]
    with torch.tpu.pad_sizes(False):
        assert compiled_by(function, rows) == [0, 1, 1, 1, 1]
    assert compiled_by(function, rows) == [0, 0, 0, 0, 0]


def test_what_was_recorded_before_the_switch_runs_as_it_was_meant_to():
    def function(x: Tensor) -> Tensor:
        return (1 / x).sum(0).atan()

    assert compiled_by(function, rows) == [1, 1, 0, 0, 0]
    before = torch.tpu.compile_stats()["compilations"]
    with torch.no_grad():
        result = function(rows(21)[0].to("tpu"))
        with torch.tpu.pad_sizes(False):
            result.cpu()
    assert torch.tpu.compile_stats()["compilations"] == before


@pytest.mark.parametrize(("environment", "expected"), [({}, "True"), ({"TPU_PAD_SIZES": "0"}, "False")])
def test_a_process_starts_with_it_unless_the_environment_says_no(environment, expected):
    script = "import torch; print(torch.tpu.get_pad_sizes())"
    assert run_python(script, **environment).stdout.strip() == expected


def test_an_index_out_of_range_is_told_with_its_own_size():
    table = torch.rand(7, 3)
    on_device = table.to("tpu")
    with torch.no_grad():
        for size in (9, 10, 11):
            on_device[torch.arange(size).to("tpu") % 7].cpu()
        wrong = torch.zeros(12, dtype=torch.long)
        wrong[-1] = 7
        picked = on_device[wrong.to("tpu")]
        with pytest.raises(IndexError, match="7"):
            torch.tpu.synchronize()
        del picked


# ---- a decoder


class Block(nn.Module):
    def __init__(self, width: int, heads: int, length: int, by_hand: bool):
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mask", torch.ones(length, length).tril())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.norm(x)).split(width, 2)
        q, k, v = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in split)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(self.mask[:length, :length] == 0, -math.inf)
            attended = scores.softmax(-1) @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second_norm(x))))


class Decoder(nn.Module):
    def __init__(self, length: int, by_hand: bool, vocabulary: int = 13, width: int = 16, layers: int = 1):
        super().__init__()
        self.length = length
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 2, length, by_hand) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.blocks(self.tokens(tokens) + self.places(places))
        return self.head(self.norm(x)[:, [-1], :])

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, greedy: bool) -> Tensor:
        for _ in range(count):
            logits = self(tokens[:, -self.length :])[:, -1] / 0.8
            least = logits.topk(5).values[:, [-1]]
            logits = logits.masked_fill(logits < least, -math.inf)
            chosen = logits.argmax(-1, keepdim=True) if greedy else logits.softmax(-1).multinomial(1)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens


@pytest.mark.parametrize(("by_hand", "rows"), [(False, 1), (False, 3), (True, 3)])
def test_a_decoder_generates_with_few_programs(by_hand, rows):
    torch.manual_seed(0)
    model = Decoder(24, by_hand).eval()
    expected = model.generate(torch.full((rows, 3), 3), 30, greedy=True)
    model = model.to("tpu")
    before = torch.tpu.compile_stats()["compilations"]
    # The prompt is made on the device, outside of `no_grad`, and nothing is read before the end.
    prompt = torch.full((rows, 3), 3, device="tpu")
    assert torch.equal(model.generate(prompt, 30, greedy=True).cpu(), expected)
    assert torch.tpu.compile_stats()["compilations"] - before <= 8


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_decoder_that_writes_into_a_buffer_generates_with_few_programs(rows, reads):
    def generate(model: nn.Module, device: str) -> Tensor:
        tokens = torch.zeros(rows, 23, dtype=torch.long, device=device)
        tokens[:, :3] = 3
        for length in range(3, 23):
            chosen = model(tokens[:, :length])[:, -1].argmax(-1)
            tokens[:, length] = chosen
            if reads:
                chosen.tolist()
        return tokens

    torch.manual_seed(0)
    model = Decoder(24, by_hand=False).eval()
    with torch.no_grad():
        expected = generate(model, "cpu")
        model = model.to("tpu")
        before = torch.tpu.compile_stats()["compilations"]
        assert torch.equal(generate(model, "tpu").cpu(), expected)
    assert torch.tpu.compile_stats()["compilations"] - before <= 6


@pytest.mark.parametrize("casts_each_turn", [False, True])
def test_a_loop_under_autocast_generates_with_few_programs(casts_each_turn):
    table = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)).to("tpu")
    tokens = torch.tensor([[3, 1, 2]], device="tpu")
    torch.tpu.flush()
    before = max((each.number for each in torch.tpu.compilations()), default=0)
    cast = torch.autocast("tpu", torch.bfloat16)  # it keeps the weights that it casts until it ends
    with torch.no_grad(), nullcontext() if casts_each_turn else cast:
        for _ in range(12):
            with cast if casts_each_turn else nullcontext():
                chosen = table(tokens).mean(1).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, chosen], 1)
            if casts_each_turn:
                chosen.tolist()
    assert tokens.tolist()
    compiled = [each for each in torch.tpu.compilations() if each.number > before]
    assert len(compiled) <= 4
    assert max(len(each.operations) for each in compiled) < 20  # the turns are no single program


@pytest.mark.parametrize("has_gradients", [True, False])
def test_news_of_a_long_compilation_say_that_gradients_keep_turns_from_sharing(has_gradients, monkeypatch):
    told = []

    @contextmanager
    def compiling(num_ops, described):
        told.append(described())
        yield

    x = torch.rand(3, 4).to("tpu")
    torch.tpu.flush()
    monkeypatch.setattr("tpu_backend.runtime.compiler.compiling", compiling)
    total = 0
    with torch.set_grad_enabled(has_gradients):
        for length in range(5, 9):
            rows = torch.cat([x, torch.ones(length, 4, device="tpu")])
            for _ in range(6 + has_gradients):  # another program each time
                rows = (rows.sin() + rows).cos()
            total = total + rows.sum()
    torch.tpu.flush()
    advice = "the turns of a loop that grows share a program under torch.no_grad()"
    assert told
    assert any(advice in text for text in told) == has_gradients


def test_draws_are_those_of_a_program_a_size():
    table = torch.rand(7, 7).to("tpu")
    drawn = []
    for mode in ("fused", "strict"):
        tokens = torch.tensor([[3, 1, 2]]).to("tpu")
        torch.tpu.manual_seed(7)
        with torch.tpu.eager_mode(mode), torch.no_grad():
            for _ in range(6):
                tokens = torch.cat([tokens, table[tokens].mean(1).softmax(-1).multinomial(1)], 1)
                torch.tpu.flush()
        drawn.append(tokens.cpu())
    assert torch.equal(*drawn)


# ---- transformers


def generate(model: nn.Module, prompt: Tensor, count: int, sampled: bool, cached: bool) -> list[int]:
    torch.manual_seed(7)
    if prompt.device.type == "tpu":
        torch.tpu.manual_seed(7)
    options = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 0}
    mask = torch.ones_like(prompt)
    return model.generate(
        prompt, attention_mask=mask, max_new_tokens=count, do_sample=sampled, use_cache=cached, **options
    ).tolist()


@pytest.mark.parametrize("cached", [True, False], ids=["with a cache", "without a cache"])
def test_transformers_generate_with_few_programs(cached):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3)
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[3, 1, 2]])
    expected = generate(model, prompt, 8, False, cached)
    model, prompt = model.to("tpu"), prompt.to("tpu")
    before = torch.tpu.compile_stats()["compilations"]
    assert generate(model, prompt, 8, False, cached) == expected
    assert torch.tpu.compile_stats()["compilations"] - before <= 7  # a size is one or two otherwise
    sampled = generate(model, prompt, 3, True, cached)
    with torch.tpu.pad_sizes(False):
        assert generate(model, prompt, 3, True, cached) == sampled


def test_ctrl_c_between_the_turns_of_a_loop_is_raised_when_all_are_launched(monkeypatch):
    """Turns that were launched cannot be taken back, so none is left out or launched twice."""
    from tpu_backend.padded.executable import Resized

    torch.manual_seed(0)
    model = Decoder(24, by_hand=False).eval().to("tpu")
    prompt = torch.tensor([[3, 1, 2]]).to("tpu")
    expected = model.generate(prompt, 20, greedy=True).cpu()
    launch, num_launches = Resized.__call__, 0

    def interrupted(self, *arguments, **options):
        nonlocal num_launches
        num_launches += 1
        if num_launches == 3:
            raise KeyboardInterrupt
        return launch(self, *arguments, **options)

    tokens = model.generate(prompt, 20, greedy=True)
    with monkeypatch.context() as patched:
        patched.setattr(Resized, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            torch.tpu.flush()
    assert num_launches > 3
    assert torch.equal(tokens.cpu(), expected)
