"""What a step of a model asks for: products, memory, and what cannot be planned."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.compiled_plan import THEIRS
from tests.parallel.planned_models import llama, text, workload
from tputrain.cli.plan import task_of
from tputrain.errors import UserError
from tputrain.metrics.flops import count_flops
from tputrain.models import add_lora
from tputrain.models.huggingface import build_huggingface
from tputrain.models.llama import LLAMA_CONFIGS, LlamaConfig
from tputrain.parallel.candidate import Candidate, Task, best, candidates
from tputrain.parallel.config import DEGREES
from tputrain.parallel.cost_model import MXU_SHARE, Seconds, newton_schulz_flops
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.memory_model import Precision, memory
from tputrain.parallel.plan import make_plan
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Matrix, Parameters, Work, Workload, for_lengths
from tputrain.recipe import read_recipe
from tputrain.shipped import find_recipe


def test_flops_are_those_that_mfu_counts() -> None:
    config = LlamaConfig(512, 64, 96, 3, 4, 2, 16, 64)
    model = llama(config)
    found = workload_of(model, text(32))
    assert found.model_flops(5) == count_flops(model, text(32)(5))
    assert found.num_parameters == sum(each.numel() for each in model.parameters())
    assert [(part.name, part.count) for part in found.parts] == [("model.layers.*", 3), ("the rest", 1)]


def test_any_module_is_planned_and_layers_that_differ_are_parts_of_their_own() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
            self.right = nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 64)])

        def forward(self, x: Tensor) -> Tensor:
            left = right = x
            for layer in self.left:
                left = layer(left).relu()
            for layer in self.right:
                right = layer(right).relu()
            return (left - right).square().mean()

    model = Towers()
    found = workload_of(model, lambda rows: torch.empty(rows, 64))
    assert [(part.name, part.count) for part in found.parts] == [
        ("left.*", 1),  # of the input, which needs no gradient
        ("left.*", 2),
        ("right.*", 1),
        ("right.*", 1),
        ("the rest", 1),
    ]
    assert found.tensor_degrees == (1,)
    assert found.model_flops(7) == count_flops(model, torch.empty(7, 64))
    assert "forward" not in vars(model.left[0])  # the model is as it was
    plan = make_plan(Task(found, Topology.parse("v5e:2x2"), 64))
    assert plan.chosen is not None


def test_attention_of_grouped_queries_is_planned_before_the_device_is_opened() -> None:
    class Attends(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            query = super().forward(x).unflatten(-1, (4, 16)).transpose(1, 2)
            keys = query[:, :2]  # PyTorch's own inference gives them the gradients of all heads
            mixed = F.scaled_dot_product_attention(query, keys, keys, is_causal=True, enable_gqa=True)
            return mixed.square().mean()

    found = workload_of(Attends(64, 64), lambda rows: torch.empty(rows, 32, 64))
    products = found.parts[-1].forward
    assert sum(work.product.is_attention for work in products) == 2
    assert found.parts[-1].kept.row >= 4 * 4 * 32 * 32  # short sequences have their scores in memory


def test_dropout_in_attention_keeps_no_scores_and_counts_its_products() -> None:
    class Attention(nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.into, self.dropout = nn.Linear(64, 3 * 64), dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.into(x).view(*x.shape[:2], 3, 1, 64).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout)
            return mixed.square().mean()

    def batch(rows: int) -> torch.Tensor:
        return torch.empty(rows, 4096, 64, device="meta")

    without, with_dropout = (workload_of(Attention(p), batch, loss_fn=None) for p in (0.0, 0.1))
    assert with_dropout.model_flops(1) == without.model_flops(1)
    kept = [work.parts[0].kept.row for work in (without, with_dropout)]
    assert kept[1] < 1.1 * kept[0]


def test_a_convolution_is_a_product_for_each_place_in_its_window() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False)
            self.grouped = nn.Conv2d(32, 64, 3, stride=2, padding=1, groups=2, bias=False)
            self.up = nn.ConvTranspose2d(64, 16, 2, stride=2, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.grouped(self.first(x))).square().mean()

    model = Net()
    found = workload_of(model, lambda rows: torch.empty(rows, 3, 32, 32))
    # PyTorch counts the gradient of a grouped weight as often as there are groups.
    of_grouped = 2 * 5 * 8**2 * model.grouped.weight.numel()
    assert found.model_flops(5) == count_flops(model, torch.empty(5, 3, 32, 32)) - of_grouped
    rest = found.parts[-1]

    def sizes(works: Sequence[Work]) -> list[tuple[float, float, float, float]]:
        assert all(work.count == 1 and work.product.has_parameter for work in works)
        return [work.sizes(10, 1) for work in works]

    def in_memory(works: Sequence[Work]) -> list[list[float]]:
        found = []
        for work in works:
            batch, m, k, n = work.sizes(10, 1)
            elements = zip((m * k, k * n, m * n), work.product.uses, strict=True)
            found.append([pytest.approx(batch * size / uses) for size, uses in elements])
        return found

    image, first, grouped, up = 10 * 3 * 32**2, 10 * 32 * 16**2, 10 * 64 * 8**2, 10 * 16 * 16**2
    weights = [each.numel() for each in model.parameters()]
    windows, pixels = 10 * 16**2, 10 * 8**2
    assert sizes(rest.forward) == [
        (7, windows, 7 * 3, 32),  # few channels: a row of the window at a time
        (2 * 9, pixels, 16, 32),
        (4, pixels, 64, 16),
    ]
    assert in_memory(rest.forward) == [
        [image, weights[0], first],
        [first, weights[1], grouped],
        [grouped, weights[2], up],
    ]
    assert sizes(rest.backward) == [  # of the input, then of the weight; images need no gradient
        (4, pixels, 16, 64),
        (4, 16, pixels, 64),
        (2 * 9, pixels, 32, 16),
        (2 * 9, 16, pixels, 32),
        (7, 7 * 3, windows, 32),
    ]
    assert in_memory(rest.backward) == [
        [up, weights[2], grouped],
        [up, grouped, weights[2]],
        [grouped, weights[1], first],
        [first, grouped, weights[1]],
        [image, first, weights[0]],
    ]


def test_images_of_few_channels_fill_their_lanes() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean()

    def kept(channels: int) -> float:
        layers = nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
        model = nn.Sequential(*layers, nn.Conv2d(channels, 256, 8), Mean())
        return workload_of(model, lambda rows: torch.empty(rows, 3, 8, 8)).parts[-1].kept.row

    assert kept(64) == kept(128)
    assert kept(256) == kept(128) + 4 * 128 * 8 * 8


def test_products_of_experts_count() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(64, 4)
            self.weight = nn.Parameter(torch.empty(4, 64, 32))

        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            _, order = self.gate(rows).argmax(1).sort()
            ends = torch.full((4,), len(order) // 4, dtype=torch.int32, device=x.device).cumsum(0).int()
            return F.grouped_mm(rows[order], self.weight, offs=ends).square().mean()

    found = workload_of(Experts(), lambda rows: torch.empty(rows, 16, 64))
    gate, experts = 2 * 16 * 64 * 4, 2 * 16 * 64 * 32  # x needs no gradient
    assert found.model_flops(5) == 5 * (gate + 2 * experts)
    assert found.parts[-1].products_kept.row >= 4 * 16 * 32


def test_rows_that_are_compared_with_rows_count_by_pairs() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.left(x) @ self.right(x).T
            return F.cross_entropy(scores, torch.arange(len(scores), device=x.device))

    model = Pairs()
    found = workload_of(model, lambda rows: torch.empty(rows, 8))
    assert found.model_flops(4096) == count_flops(model, torch.empty(4096, 8))
    rest = found.parts[-1]
    scores = 4 * 4096**2
    assert 2 * scores <= rest.backward_peak.at(4096, 1) < 5 * scores


def test_layers_of_transformers_attend_as_in_a_run() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "qwen3", "vocab_size": 64, "max_position_embeddings": 2048, **sizes, **heads}
    with torch.device("meta"):
        model = build_huggingface(config)
    layer = workload_of(model, text(2048), has_masters=True).parts[0]
    assert [work.product.is_causal for work in layer.forward if work.product.is_attention] == [True, True]
    scores = 4 * 2048**2 * 4
    assert layer.forward_peak.at(1, 1) < scores / 4  # a kernel's are never in memory
    # Its log sums are, in all lanes; and what it reads, behind the norms of queries and keys.
    log_sums, read = 4 * 2048 * 4 * 128, 2 * 2048 * (4 + 2) * 64
    assert layer.kept.at(1, 1) >= layer.products_kept.at(1, 1) + log_sums + read


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_loss_of_blocks_has_the_logits_of_one_and_the_gradient_of_its_weight(is_tied: bool) -> None:
    classes, width = 50_000, 64
    config = LlamaConfig(classes, width, 96, 2, 4, 2, 16, 4096, tie_word_embeddings=is_tied)
    found = workload_of(llama(config), text(4096))
    rest = found.parts_among(1)[-1]
    logits, weight = 4 * 4096 * classes, 4 * classes * width
    assert rest.logits.at(2, 1) == 2 * logits
    assert weight <= rest.backward_peak.at(2, 1) < weight + logits / 8
    assert rest.most_logits <= 2**26
    assert rest.sums == 0  # they are as the gradient: float32
    # A tied weight's gradient waits for that of the embedding, while layers go backward.
    assert rest.held.at(2, 1) == pytest.approx(weight if is_tied else 0, abs=1000)
    if not is_tied:
        divided = found.parts_among(2)[-1]  # each of two ranks has the logits of half the classes
        assert divided.logits.at(2, 2) == 0
        assert logits < divided.backward_peak.at(2, 2) < 2.01 * logits  # and their gradients
    assert found.model_flops(5) == count_flops(llama(config), text(4096)(5))


def test_a_loss_at_once_rounds_its_gradients_where_it_makes_them() -> None:
    classes, width, rows = 50_000, 64, 1
    config = LlamaConfig(classes, width, 96, 2, 4, 2, 16, 4096, tie_word_embeddings=False)
    few, many = (workload_of(llama(config).bfloat16(), text(length)) for length in (32, 4096))
    found = [
        memory(
            each, shards=8, tensor=1, rows=rows, rung="layers", is_accumulated=False, precision=Precision()
        )
        for each in (few, many)
    ]
    weight = 2 * classes * width
    assert few.parts_among(1)[-1].sums == weight  # which are there in blocks alone
    assert [each.moment for each in found] == ["head", "loss"]
    # What is scattered, and what comes of it.
    assert 2.1 * weight < found[0].gathered < 2.3 * weight
    # In blocks: the gathered weight, sums in float32, the gradient, and a block's logits, which count twice.
    assert weight < found[1].gathered < 1.3 * weight
    logits = many.parts_among(1)[-1].most_logits
    assert 2 * weight < found[1].working - 2 * logits < 3 * weight


@pytest.mark.parametrize(("shards", "times"), [(1, 1), (8, 2)])
def test_logits_of_blocks_count_again_where_a_scatter_follows(shards: int, times: int) -> None:
    config = LlamaConfig(50_000, 64, 96, 2, 4, 2, 16, 4096, tie_word_embeddings=False)
    given = workload_of(llama(config).bfloat16(), text(4096))
    rest = given.parts_among(1)[-1]
    for has_logits_twice in (False, True):
        found = memory(
            given,
            shards=shards,
            tensor=1,
            rows=1,
            rung="layers",
            is_accumulated=False,
            precision=Precision(),
            has_logits_twice=has_logits_twice,
        )
        assert found.moment == "loss"
        of_values = rest.forward_peak.at(1, 1) + rest.sums
        assert found.working == of_values + (times + has_logits_twice) * rest.most_logits


def test_tensor_parallelism_divides_what_its_plan_cuts() -> None:
    found = workload("llama-8b", 4096)
    assert found.tensor_degrees == (1, 2, 4, 8)
    layer = found.parts[0]
    assert layer.parameters.whole == 2 * 4096  # norms
    forward = layer.forward_reductions.at(1, 8)
    assert forward == 2 * 4096 * 4096 * 2  # o_proj and down_proj: [4096, 4096] in bfloat16


def test_context_degrees_are_those_that_a_run_takes_with_kernels_of_whole_blocks() -> None:
    found = workload("llama-8b", 32_768)
    assert found.context_degrees == (1, 2, 4, 8, 16)
    assert workload("llama-8b", 4096).context_degrees == (1, 2, 4)  # two stretches of 512 tokens
    assert for_lengths(found, [32_768, 8192]).context_degrees == (1, 2, 4, 8)
    assert for_lengths(found, [32_768, 1000]).context_degrees == (1,)
    assert for_lengths(found, []).context_degrees == (1,)  # batches of any length may come

    config = LlamaConfig(512, 64, 96, 3, 4, 2, 16, 64)
    given = workload_of(llama(config), text(4096), loss_fn=lambda output, labels: output)
    assert given.context_degrees == (1,)  # it may shift labels itself
    theirs = build_huggingface({"model_type": "llama", **THEIRS})
    assert workload_of(theirs, text(4096)).context_degrees == (1, 2, 4)
    theirs.config._attn_implementation = "eager"  # type: ignore[union-attr]  # a run would refuse it
    assert workload_of(theirs, text(4096)).context_degrees == (1,)
    not_compared = build_huggingface({"model_type": "arcee", "head_dim": 64, **THEIRS})
    assert workload_of(not_compared, text(4096)).context_degrees == (1,)


def test_context_ranks_have_to_be_worth_a_tenth_of_the_step() -> None:
    task = Task(workload("llama-8b", 4096), Topology.parse("2x v5e:16x16"), 1024)
    found = [each for each in candidates(task) if each.code == "slower"]
    plain, divided = (
        min((each for each in found if (each.layout.degrees["context"] > 1) == is_divided), key=_seconds)
        for is_divided in (False, True)
    )

    def with_gain(gain: float) -> Candidate:
        return replace(divided, seconds=_of(_seconds(plain) * (1 - gain)))

    plain = replace(plain, seconds=_of(_seconds(plain)))
    assert best([plain, with_gain(0.09)]) is plain
    worth = with_gain(0.11)
    assert best([plain, worth]) is worth


def _seconds(candidate: Candidate) -> float:
    assert candidate.seconds is not None
    return candidate.seconds.total


def _of(products: float) -> Seconds:
    return Seconds(products, *[0.0] * (len(fields(Seconds)) - 2))


def test_thin_shards_are_those_with_fewer_rows_than_a_tile() -> None:
    by_rows, by_columns, whole = Matrix(1024, 100, 0), Matrix(1024, 10, 1), Matrix(64, 1, None)
    parameters = Parameters(matrices=(by_rows, by_columns, whole))
    thin = {
        (shards, tensor): parameters.in_thin_shards(shards, tensor, itemsize=4)
        for shards, tensor in ((1, 1), (8, 1), (16, 1), (128, 1), (256, 1), (1, 256), (32, 8), (128, 8))
    }
    assert thin == {
        (1, 1): 0,
        (8, 1): 0,
        (16, 1): 1 / 2,  # 4 of 8 rows
        (128, 1): 15 / 16,
        (256, 1): 110 / 2 + 31 / 32,
        (1, 256): 0,
        (32, 8): 100 / 8 / 2 + 3 / 4,
        (128, 8): 100 / 8 * 7 / 8 + 15 / 16,
    }
    assert parameters.in_thin_shards(128, 1, itemsize=2) == thin[256, 1]  # of 16 rows


def test_with_master_weights_a_plan_computes_in_bfloat16() -> None:
    config = replace(LLAMA_CONFIGS["llama-5m"], num_hidden_layers=2)
    rounded = llama(config)
    for each in rounded.parameters():
        each.data = each.data.bfloat16()
    assert workload_of(llama(config), text(32), has_masters=True) == workload_of(rounded, text(32))
    recipe = find_recipe("llama")
    plain, masters = (
        task_of(read_recipe(recipe, [f"optim.master_weights={has}"]), Topology.parse("v6e:2x2"))
        for has in ("false", "true")
    )
    assert masters.precision.optimizer == plain.precision.optimizer + 4
    assert {each.parameters.itemsize for each in masters.workload.parts} == {2}


def test_of_a_recipe_with_lora_the_narrow_matrices_alone_are_trained() -> None:
    topology = Topology.parse("v5e:2x2")
    sizes = []
    for rank in (0, 8):
        cfg = read_recipe(find_recipe("llama"), [f"lora.rank={rank}"])
        task = task_of(cfg, topology)
        chosen = make_plan(task).chosen
        assert chosen is not None
        assert task.workload.tensor_degrees == (1, 2)
        owned = [(part.count, part.parameters) for part in task.workload.parts]
        trained = sum(count * each.trained(1) for count, each in owned)
        with torch.device("meta"):
            model = cfg.model.build_empty()
            if rank > 0:
                add_lora(model, cfg.lora, cfg.seed)
        assert trained == sum(each.numel() for each in model.parameters() if each.requires_grad)
        sizes.append(chosen.memory.optimizer * chosen.layout.degrees["shard"])
    whole, narrow = sizes
    assert narrow < whole / 10


def test_iterations_of_muon_count() -> None:
    """By hand, of one matrix; and ranks divide the matrices of a shape among them."""
    assert newton_schulz_flops(4, 2) == 5 * (2 * 2 * 4 * 2 + 2 * 2 * 2 * 2 + 2 * 2 * 2 * 4)
    topology, found = Topology.parse("v5p:2x2x1"), {}
    for name in ("sgd", "muon"):
        cfg = read_recipe(find_recipe("llama"), [f"optim.name={name}", "model.name=llama-1b"])
        plan = make_plan(replace(task_of(cfg, topology), degrees=dict.fromkeys(DEGREES, 1) | {"shard": 4}))
        assert plan.chosen is not None
        assert plan.chosen.seconds is not None
        found[name] = plan.chosen.seconds.optimizer
    flops = sum(
        part.count * newton_schulz_flops(matrix.rows, matrix.elements // matrix.rows)
        for part in plan.task.workload.parts[:-1]
        for matrix in part.parameters.matrices
    )
    assert not any(each.is_hidden for each in plan.task.workload.parts[-1].parameters.matrices)
    seconds = flops / 4 / (topology.peak_flops * MXU_SHARE["v5p"])
    assert found["muon"] - found["sgd"] == pytest.approx(seconds, rel=0.01)


def test_muon_iterates_on_what_it_trains() -> None:
    def hidden(workload: Workload) -> list[tuple[int, int]]:
        return [
            (matrix.rows, matrix.elements // matrix.rows)
            for part in workload.parts
            for matrix in part.parameters.matrices
            if matrix.is_hidden
            for _ in range(part.count)
        ]

    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum()

    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 2), Loss())  # nothing is repeated
    assert sorted(hidden(workload_of(model, lambda rows: torch.empty(rows, 4)))) == [(6, 8), (8, 4)]
    model[0].requires_grad_(False)
    assert hidden(workload_of(model, lambda rows: torch.empty(rows, 4))) == [(6, 8)]


def test_a_model_that_reads_values_is_refused_with_the_line_that_does() -> None:
    class Reads(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * how(x)  # type: ignore[no-any-return]

    def item(x: Tensor) -> Any:
        return x.sum().item()

    def shape(x: Tensor) -> Any:
        return x[x > 0].shape[0]

    def numpy(x: Tensor) -> Any:
        return x.numpy().sum()

    for how in (item, shape, numpy):
        line = how.__code__.co_firstlineno + 1
        place = f"{Path(__file__).name}:{line}: return x"
        expected = rf"^Reads: cannot be planned: it reads a value at .*{place}.*torch.where"
        with pytest.raises(UserError, match=expected):
            workload_of(Reads(4, 4), lambda rows: torch.empty(rows, 4))


def test_an_error_of_the_model_or_its_loss_is_told_as_what_it_is() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("an odd width")

    class Logits(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    with pytest.raises(UserError, match=r"^Fails: cannot be planned: ValueError: an odd width at .*: raise"):
        workload_of(Fails(4, 4), lambda rows: torch.empty(rows, 4))

    def batch(rows: int) -> Any:
        return torch.empty(rows, 7, 4), torch.zeros(rows, 7, dtype=torch.long)

    expected = r"Expected target size \[2, 4\].* in the loss of outputs \[2, 7, 4\] with labels \[2, 7\]$"
    with pytest.raises(UserError, match=f"^Logits: cannot be planned: RuntimeError: {expected}"):
        workload_of(Logits(4, 4), batch)


def test_a_tensor_that_a_model_makes_on_its_device_does_not_open_it() -> None:
    code = """
import torch
from torch import nn
from tputrain.parallel.dry_run import workload_of

class Makes(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * torch.tensor([2.0], device=x.device)).sum()

workload_of(Makes(4, 4), lambda rows: torch.empty(rows, 4))
print(torch.tpu.is_initialized())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("False\n", "")
