"""Plans: topologies by name, what a model asks for, which layout is chosen, and how refusals read.

`python -m tests.parallel.test_plan` writes the golden files anew.
"""

import json
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain.cli import main
from tputrain.cli.plan import task_of
from tputrain.errors import UserError
from tputrain.figures import memory_text, seconds_text
from tputrain.metrics.flops import count_flops
from tputrain.models import add_lora
from tputrain.models.huggingface import build_huggingface
from tputrain.models.llama import LLAMA_CONFIGS, Llama, LlamaConfig
from tputrain.optim.config import AdamWConfig
from tputrain.parallel.candidate import Task
from tputrain.parallel.config import DEGREES
from tputrain.parallel.cost_model import MXU_SHARE, newton_schulz_flops
from tputrain.parallel.layout import Layout, layouts, mesh_of
from tputrain.parallel.memory_model import Precision, memory
from tputrain.parallel.plan import Plan, make_plan
from tputrain.parallel.plan_report import ARGUMENTS, GRADIENTS, TEMPORARIES, lines, picture
from tputrain.parallel.topology import CHIPS, GIB, Topology, shapes
from tputrain.parallel.variants import Settings, Variant
from tputrain.parallel.workload import Matrix, Parameters, Workload, workload_of
from tputrain.planning.compiled_step import CollectiveSum, CompiledStep
from tputrain.planning.peak import Buffer, Peak
from tputrain.planning.recipe_variants import RecipeVariants
from tputrain.recipe import read_recipe
from tputrain.report.plan_page import plan_page
from tputrain.shipped import find_recipe

GOLDEN = Path(__file__).parent / "plans"
# Model, topology, sequences of a step, tokens of one.
CASES = [
    ("llama-1b", "v5e:2x2", 64, 2048),
    ("llama-8b", "v5p-128", 512, 4096),
    ("llama-8b", "v6e:16x16", 1024, 4096),
    ("llama-8b", "2x v5e:16x16", 1024, 4096),
    ("llama-70b", "v5p:8x8x8", 1024, 4096),
    ("llama-70b", "tpu7x:4x4x4", 512, 4096),
    ("llama-405b", "v5p:8x8x8", 1024, 4096),
    ("llama-70b", "400x v6e:16x16", 102_400, 4096),  # 102,400 chips
    ("llama-405b", "11x tpu7x:16x24x24", 101_376, 4096),  # 101,376 chips
]


def text(sequence: int) -> Any:
    def batch(rows: int) -> dict[str, Tensor]:
        size = (rows, sequence)
        return {key: torch.empty(size, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}

    return batch


def llama(config: LlamaConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config)


_workloads: dict[tuple[str, int], Workload] = {}


def workload(name: str, sequence: int) -> Workload:
    if (name, sequence) not in _workloads:
        model = llama(LLAMA_CONFIGS[name])
        _workloads[name, sequence] = workload_of(model, text(sequence), name=name, autocast="bfloat16")
    return _workloads[name, sequence]


def planned(name: str, topology: str, rows: int, sequence: int) -> Plan:
    precision = Precision.of(AdamWConfig(), "bfloat16")
    return make_plan(Task(workload(name, sequence), Topology.parse(topology), rows, precision=precision))


def golden_file(name: str, topology: str) -> Path:
    return GOLDEN / f"{name}-{topology.replace(':', '-').replace(' ', '')}.json"


@pytest.mark.parametrize(("name", "topology", "rows", "sequence"), CASES)
def test_a_plan_is_that_of_its_golden_file(name: str, topology: str, rows: int, sequence: int) -> None:
    found = planned(name, topology, rows, sequence).as_json(num_candidates=4)
    assert found == json.loads(golden_file(name, topology).read_text())


# -- topologies


@pytest.mark.parametrize(
    ("text", "name", "chips", "hosts"),
    [
        ("v6e:16x16", "v6e:16x16", 256, 64),
        ("v6e-8", "v6e:2x4", 8, 1),
        ("v5litepod-16", "v5e:4x4", 16, 4),
        ("v5p-128", "v5p:4x4x4", 64, 16),  # cores
        ("v4-8", "v4:2x2x1", 4, 1),
        ("2x v5e:16x16", "2x v5e:16x16", 512, 128),
        ("3xv5p:8x4x4", "3x v5p:4x4x8", 384, 96),
        ("ironwood:4x4x4", "tpu7x:4x4x4", 64, 16),
        ("v6e: 2x2", "v6e:2x2", 4, 1),
        ("2 x v5e : 16 x 16", "2x v5e:16x16", 512, 128),
    ],
)
def test_topologies_have_the_names_that_users_write(text: str, name: str, chips: int, hosts: int) -> None:
    found = Topology.parse(text)
    assert (found.name, found.num_chips, found.num_hosts) == (name, chips, hosts)
    assert Topology.parse(found.name) == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v7e-8", "no TPU is called v7e .*did you mean"),
        ("v6e:16x17", "no slice of that shape; nearest: v6e:16x16 and v6e:8x16"),
        ("v5p-100", "no slice of 100 cores; nearest: v5p-64 and v5p-128"),
        ("v6e", "expected a slice such as v6e:16x16"),
        ("0x v6e:4x4", "expected at least one slice"),
        ("v6e:4xx4", "expected a slice"),
        ("v6e:1 6x16", "expected a slice"),
    ],
)
def test_an_unknown_topology_is_refused_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Topology.parse(text)


@pytest.mark.parametrize(
    ("text", "wraps"),
    [
        ("v6e:16x16", [True, True]),
        ("v6e:8x16", [False, True]),
        ("v5e:4x4", [False, False]),
        ("v5p:4x4x4", [True, True, True]),
        ("v5p:2x4x4", [False, False, False]),
    ],
)
def test_axes_wrap_where_the_pod_links_their_ends(text: str, wraps: list[bool]) -> None:
    assert [axis.wraps for axis in Topology.parse(text).axes] == wraps


def test_every_shape_of_every_chip_is_its_own_name() -> None:
    for chip in CHIPS.values():
        for shape in shapes(chip):
            assert Topology.parse(Topology(chip, shape).name).shape == shape


# -- what a model asks for


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
    # In blocks: the gathered weight, sums in float32, and the gradient.
    assert weight < found[1].gathered < 1.3 * weight
    assert 2 * weight < found[1].working - many.parts_among(1)[-1].most_logits < 3 * weight


def test_tensor_parallelism_divides_what_its_plan_cuts() -> None:
    found = workload("llama-8b", 4096)
    assert found.tensor_degrees == (1, 2, 4, 8)
    assert "k_proj has 8 heads" in found.why_not_tensor
    layer = found.parts[0]
    assert layer.parameters.whole == 2 * 4096  # norms
    forward = layer.forward_reductions.at(1, 8)
    assert forward == 2 * 4096 * 4096 * 2  # o_proj and down_proj: [4096, 4096] in bfloat16


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


def test_thin_shards_cost_time() -> None:
    found = planned("llama-8b", "v5p:16x16x16", 4096, 2048)
    assert found.chosen is not None
    assert 4096 / found.chosen.layout.degrees["shard"] >= 16  # all weights but those of keys and values
    assert "without replicas the step would take" in "".join(found.why)


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
        expected = (
            rf"^Reads: cannot be planned: it reads a value at .*test_plan.py:{line}: return x.*torch.where"
        )
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
from tputrain.parallel.workload import workload_of

class Makes(nn.Linear):
    def forward(self, x):
        return (super().forward(x) * torch.tensor([2.0], device=x.device)).sum()

workload_of(Makes(4, 4), lambda rows: torch.empty(rows, 4))
print(torch.tpu.is_initialized())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


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


# -- layouts and choices


def test_each_device_is_in_one_place_of_the_mesh_and_rings_stay_rings() -> None:
    topology = Topology.parse("2x v5e:4x4")
    layout = Layout(topology, ((1, 1, 4, 1), (2, 1, 2, 1)))
    places = [(s, x, y) for s in range(2) for x in range(4) for y in range(4)]
    mesh = torch.tensor(mesh_of(layout, places))
    assert mesh.shape == (2, 8, 1, 2)
    assert sorted(mesh.flatten().tolist()) == list(range(32))
    for replicate in range(2):
        for shard in range(8):
            near, far = (places[rank] for rank in mesh[replicate, shard, 0])
            assert near[:2] == far[:2]  # tensor ranks are neighbours along y
            assert far[2] - near[2] == 1
    assert {places[rank][0] for rank in mesh[1].flatten().tolist()} == {1}  # only replicas go over DCN


def test_a_ring_is_twice_as_fast_as_a_line_and_a_part_of_it_is_a_line() -> None:
    topology = Topology.parse("v6e:8x16")
    line = Layout(topology, ((1, 1, 8, 1), (1, 1, 1, 16)))
    ring = Layout(topology, ((1, 1, 1, 8), (1, 1, 16, 1)))
    assert line.groups["shard"].bandwidth == topology.chip.link_bandwidth
    assert ring.groups["shard"].bandwidth == 2 * topology.chip.link_bandwidth
    part = Layout(topology, ((1, 1, 1, 8), (4, 1, 4, 1)))
    assert part.groups["tensor"].bandwidth == topology.chip.link_bandwidth
    assert part.groups["shard"].bandwidth == 2 * topology.chip.link_bandwidth / 4


def test_degrees_of_every_layout_are_all_devices() -> None:
    topology = Topology.parse("3x v5p:4x4x8")
    for layout in layouts(topology, (1, 2, 4, 8), (1, 2)):
        degrees = layout.degrees
        product = 1
        for degree in degrees.values():
            product *= degree
        assert product == topology.num_devices
        assert degrees["replicate"] % 3 == 0


@pytest.mark.parametrize(
    ("name", "topology", "rows", "change"),
    [
        (
            "llama-8b",
            "v5e:2x2",
            4,
            "a larger slice: v5e:2x4 (tight, 15.4 GiB of 15.5 GiB: --compile says whether it fits)",
        ),
        (
            "llama-405b",
            "v5e:4x4",
            64,
            "other chips: tpu7x:4x4x4 (64 chips), v5p:4x4x8 (128 chips) or v6e:16x16 (256 chips)",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_the_smallest_change_that_would(
    name: str, topology: str, rows: int, change: str
) -> None:
    plan = planned(name, topology, rows, 4096)
    assert plan.chosen is None
    message = plan.refusal()
    assert message.startswith(f"{name} on {topology}: does not fit: the layout that needs least takes ")
    assert message.endswith(f", which has 15.5 GiB; what would fit: {change}")
    assert "\n" not in message
    assert plan.as_json(1)["fits"] is False
    for slice_ in re.findall(r"\w+:[\dx]+", change):
        assert planned(name, slice_, rows, 4096).chosen is not None


def test_a_model_that_no_slice_holds_is_told_how_many_layers_would_fit() -> None:
    found = workload("llama-405b", 4096)
    layer, rest = found.parts

    def plan(num_layers: int) -> Plan:
        deep = replace(found, parts=(replace(layer, count=num_layers), rest))
        return make_plan(Task(deep, Topology.parse("v5e:16x16"), 1024))

    match = re.fullmatch(
        r".*; what would fit: a model of (\d+) layers in place of 100000", plan(100_000).refusal()
    )
    assert match is not None
    assert plan(int(match[1])).chosen is not None
    assert plan(int(match[1]) + 1).chosen is None


def test_a_step_that_is_too_good_is_doubted() -> None:
    doubt = "        expect less: no published step of a dense model on TPUs has over 70% MFU"
    for name, topology, rows, is_doubted in (
        ("llama-70b", "v5p:8x8x8", 1024, True),
        ("llama-8b", "v6e:16x16", 1024, False),
    ):
        plan = planned(name, topology, rows, 4096)
        assert plan.chosen is not None
        assert (plan.chosen.mfu > 0.7) == is_doubted
        assert any(line.startswith(doubt) for line in lines(plan)) == is_doubted


def test_a_batch_that_does_not_divide_names_one_that_does() -> None:
    plan = make_plan(Task(workload("llama-1b", 2048), Topology.parse("v5e:16x16"), 7))
    assert plan.chosen is None
    message = plan.refusal()
    assert "7 sequences a step do not divide among its devices; what would fit: a multiple of " in message


MASTERS = "optim.master_weights=true"
LLAMA_8B = ("model.name=llama-8b", "execution.autocast=bfloat16")


def plan_of_recipe(recipe: str, topology: str, *overrides: str) -> Plan:
    return make_plan(task_of(read_recipe(find_recipe(recipe), list(overrides)), Topology.parse(topology)))


@pytest.mark.parametrize(
    ("recipe", "topology", "overrides"),
    [("llama", "3x v5e:2x2", ("batch.tokens=65536",)), ("digits", "v6e:16x16", ())],
)
def test_a_batch_that_is_named_can_be_set_and_divides(
    recipe: str, topology: str, overrides: tuple[str, ...]
) -> None:
    plan = plan_of_recipe(recipe, topology, *overrides)
    assert plan.chosen is None
    (change,) = plan.changes
    assert change.startswith("batch.")
    assert plan_of_recipe(recipe, topology, *overrides, change).chosen is not None


def test_changes_are_planned_once_and_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, of = [], RecipeVariants.of

    def counted(variants: RecipeVariants, task: Task, settings: Settings) -> Variant | None:
        tried.append(settings)
        return of(variants, task, settings)

    monkeypatch.setattr(RecipeVariants, "of", counted)
    plan = plan_of_recipe("digits", "v6e:4x4")
    assert not tried
    (change,) = plan.changes
    count = len(tried)
    assert count > 0
    assert change in "\n".join(lines(plan))
    assert change in plan_page(plan)
    assert plan.as_json()["changes"] == [change]
    assert len(tried) == count


def test_master_weights_are_named_with_the_step_that_they_bring() -> None:
    batch = ("data.sequence_length=4096", "batch.tokens=1048576")
    plan = plan_of_recipe("llama", "v6e:4x4", *LLAMA_8B, *batch)
    (change,) = plan.changes
    followed = plan_of_recipe("llama", "v6e:4x4", *LLAMA_8B, *batch, MASTERS)
    assert followed.chosen is not None
    assert followed.chosen.seconds is not None
    assert followed.chosen.memory is not None
    assert change.startswith(
        f"{MASTERS}: a step 11% shorter, {seconds_text(followed.chosen.seconds.total)}, "
    )
    assert memory_text(followed.chosen.memory.total) in change
    assert not followed.changes


def test_what_only_context_parallelism_would_fit_is_told_with_a_change_that_can_be_followed() -> None:
    sizes = ("model.name=llama-405b", "execution.autocast=bfloat16", "batch.tokens=16777216")
    plan = plan_of_recipe("llama", "v5p-2048", *sizes, "data.sequence_length=131072")
    message = plan.refusal()
    assert (
        "; with parallel.context=16 it would fit, but context parallelism is not chosen by itself" in message
    )
    figures = re.search(r"takes ([\d.]+) GiB a device, which has ([\d.]+) GiB", message)
    assert figures is not None
    assert float(figures[1]) > float(figures[2])
    assert plan.changes[0].startswith("data.sequence_length=8192 in place of 131072")
    assert plan_of_recipe("llama", "v5p-2048", *sizes, "data.sequence_length=8192").chosen is not None


def test_other_chips_are_those_that_fit_and_are_not_much_slower() -> None:
    overrides = (*LLAMA_8B, "data.sequence_length=131072", "batch.tokens=4194304")
    plan = plan_of_recipe("llama", "v5e:4x4", *overrides)
    change = plan.changes[0]
    slices = [Topology.parse(each) for each in re.findall(r"\w+:[\dx]+", change)]
    assert [each.name for each in slices] == ["tpu7x:1x1x1", "v5p:2x2x1", "v6e:2x4"]
    assert "(1 chip;" in change
    for each in slices:
        assert plan_of_recipe("llama", each.name, *overrides).chosen is not None
        assert 4 * each.num_chips * each.chip.peak_flops >= 16 * CHIPS["v5e"].peak_flops


def test_heads_are_named_by_settings_that_keep_the_parameters() -> None:
    overrides = ["execution.autocast=bfloat16", "data.sequence_length=1024", "batch.tokens=16384", MASTERS]
    name = "model.name=llama-100m"
    plan = plan_of_recipe("llama", "v5e:2x2", name, *overrides)
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    heads = "model.num_attention_heads=6 model.num_key_value_heads=2 model.head_dim=128"
    (change,) = [each for each in plan.changes if "head_dim" in each]
    assert change.startswith(f"{heads}: as many parameters, and a step ")
    followed = plan_of_recipe("llama", "v5e:2x2", name, *overrides, *heads.split())
    assert followed.chosen is not None
    assert followed.chosen.seconds is not None
    gain = 1 - followed.chosen.seconds.total / plan.chosen.seconds.total
    assert f"a step {gain:.0%} shorter" in change
    assert followed.task.workload.num_parameters == plan.task.workload.num_parameters


def test_a_small_model_is_not_told_of_larger_sizes_or_of_heads_that_it_cannot_have() -> None:
    plan = plan_of_recipe("digits", "v6e:4x4")
    (change,) = plan.changes
    assert change.startswith("execution.autocast=bfloat16: a step 13% shorter")
    assert any(each.startswith("so small a step was not compared") for each in plan.notes)


def test_a_larger_size_is_named_where_the_step_is_hardly_longer() -> None:
    sizes = ("execution.autocast=bfloat16", "model.name=llama-1b", "model.intermediate_size=5140", MASTERS)
    batch = ("data.sequence_length=2048", "batch.tokens=131072")
    plan = plan_of_recipe("llama", "v6e:2x2", *sizes, *batch)
    (change,) = [each for each in plan.changes if "intermediate" in each]
    settings = change.partition(":")[0]
    assert settings == "model.intermediate_size=5376"
    followed = plan_of_recipe("llama", "v6e:2x2", *sizes, *batch, settings)
    assert followed.chosen is not None
    assert followed.chosen.seconds is not None
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    assert followed.chosen.seconds.total < 1.02 * plan.chosen.seconds.total


def test_what_bounds_a_step_is_its_largest_share() -> None:
    plan = plan_of_recipe("instruct", "v6e:4x4")
    said = list(lines(plan))
    (step,) = [number for number, line in enumerate(said) if line.startswith("step ")]
    assert said[step].endswith("; bound by waiting for tensor ranks")
    assert said[step + 1].strip().startswith("waiting for tensor ranks ")
    assert "8 replicas in a slice, each with all parameters: no layer is gathered" in plan.why


def test_a_plan_for_processes_of_a_cpu_has_no_mfu() -> None:
    said = "\n".join(lines(plan_of_recipe("digits", "cpu:2")))
    assert "2 processes" in said
    assert "rows/s a process" in said
    assert "MFU" not in said
    assert "modelled for a stand-in chip" in said


def test_every_candidate_has_a_code_and_figures() -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    found = plan.as_json()
    assert sum(found["counts"].values()) == len(found["candidates"])
    assert sum(each["code"] == "chosen" for each in found["candidates"]) == 1
    for each in found["candidates"]:
        assert each["code"] in found["codes"]
        assert each["code"] == "chosen" or each["reason"]
        assert each["code"] == "batch" or each["memory_gib"]["total"] > 0
    fitting = [each for each in found["candidates"] if each["code"] in ("chosen", "slower")]
    assert all(each["degrees"]["context"] == 1 for each in fitting)


def test_more_checkpointing_never_keeps_more() -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    totals = {
        each.rung: each.memory.kept
        for each in plan.candidates
        if each.memory is not None and each.rows == 1 and each.layout.degrees["shard"] == 4
    }
    if "none" in totals and "layers" in totals:
        assert totals["layers"] < totals["none"]


def test_the_report_says_what_there_is_to_know() -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    said = "\n".join(lines(plan))
    for word in ("MFU", "GiB a device", "bound by", "a line: shard 2", "heads of 64", "shard 4: parameters"):
        assert word in said, said
    assert max(map(len, said.splitlines())) < 160


@pytest.mark.parametrize(("used", "is_said"), [(0.94, False), (0.96, True)])
def test_a_plan_that_just_fits_says_that_it_is_tight(used: float, is_said: bool) -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    assert plan.chosen is not None
    assert plan.chosen.memory is not None
    memory = replace(plan.chosen.memory, parameters=0.0, optimizer=0.0)
    memory = replace(memory, parameters=used * plan.task.most - memory.total)
    full = replace(plan, chosen=replace(plan.chosen, memory=memory))
    assert any(each.startswith("note    tight: ") for each in lines(full)) == is_said


def test_the_picture_shows_replicas_and_tensor_ranks() -> None:
    layout = Layout(Topology.parse("v5e:4x4"), ((1, 1, 2, 2), (2, 1, 2, 1)))
    assert picture(layout)[-5:-1] == ["    A-A A-A", "    A-A A-A", "    B-B B-B", "    B-B B-B"]


class Page(HTMLParser):
    """The text of a page and of its titles, and everything it would load."""

    def __init__(self, page: str):
        super().__init__()
        self.text, self.open = "", []
        self.titles: list[str] = []
        self.widths: list[list[float]] = []
        self.feed(page)
        assert not self.open
        self.svgs = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", page, re.S)]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert not {"src", "href", "srcset", "action", "data"} & set(found)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if found.get("class") == "stack":
            self.widths.append([])
        if tag == "i" and (match := re.fullmatch(r"width:([\d.]+)%", found.get("style") or "")):
            self.widths[-1].append(float(match[1]))
            self.titles.append(str(found["title"]))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def test_the_page_has_the_torus_memory_and_the_time_line_and_loads_nothing() -> None:
    plan = planned("llama-70b", "v6e:16x16", 128, 4096)
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    page = plan_page(plan)
    assert "http" not in page
    seen = Page(page)
    (svg,) = seen.svgs
    assert len([each for each in svg.iter() if "chip" in each.get("class", "")]) == 256
    assert len([each for each in svg.iter() if each.get("class") == "ring"]) == 2
    layout = plan.chosen.layout
    mesh = torch.tensor(mesh_of(layout, [(0, x, y) for x in range(16) for y in range(16)]))
    axes = ("replicate", "shard", "context", "tensor")
    assert layout.degrees == dict(zip(axes, mesh.shape, strict=True))
    place = (mesh == 16 * 3 + 5).nonzero()[0].tolist()
    used = [f"{axis} {at}" for axis, at, size in zip(axes, place, mesh.shape, strict=True) if size > 1]
    assert len(used) > 1
    assert f"x=3 y=5: {', '.join(used)}" in {each.text for each in svg.iter("title")}
    memory, core, links = seen.widths
    size = plan.chosen.memory
    assert size is not None
    assert sum(memory) == pytest.approx(100 * size.total / plan.task.most, abs=0.1)
    assert sum(core) == pytest.approx(100, abs=0.1)
    assert sum(links) <= 100.1
    assert any(each.startswith("products: ") for each in seen.titles)
    for reason in plan.why:
        assert reason in seen.text


def test_the_page_of_a_compiled_plan_has_the_compilers_figures_and_names_are_escaped() -> None:
    task = replace(planned("llama-1b", "v5e:2x2", 64, 2048).task)
    named = replace(task, workload=replace(task.workload, name="<b>mine</b>"))
    step = CompiledStep(
        arguments=4 * GIB,
        temporaries=20 * GIB,
        estimated=0.9,
        unestimated=0.0,
        waiting=0.1,
        copying=0.0,
        flops=1e12,
        collectives=(CollectiveSum("all-gather", "shard", 12, GIB, 0.01),),
        parts=(("forward model.layers.*: dot_general", 0.4),),
        depth="4 of 16 layers",
        record_seconds=1.0,
        compile_seconds=1.0,
        compiler="libtpu 0.0",
        peak=Peak(19 * GIB, "loss", (Buffer("forward lm_head", "dot_general", "bf16[9,7]", 2, 17 * GIB),)),
    )
    page = plan_page(make_plan(named), step)
    assert "<b>mine" not in page
    seen = Page(page)
    for text in (
        "1 s ±15%",
        "forward model.layers.*: dot_general",
        "all-gather",
        "24.0 GiB",
        "40 %",
        "all others",
        "60 %",
        "17.0 GiB",
        "bf16[9,7]",
    ):
        assert text in seen.text, text
    assert "temporaries: 20.0 GiB" in seen.titles
    assert "waiting for collectives (modelled): 100 ms" in seen.titles


# -- the command


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


@pytest.mark.parametrize(
    ("said", "rungs"),
    [("null", {"none", "products", "layers", "offload"}), ("false", {"none"}), ("products", {"products"})],
)
def test_a_plan_holds_to_the_checkpointing_of_the_recipe(said: str, rungs: set[str]) -> None:
    cfg = read_recipe(find_recipe("llama"), [f"model.activation_checkpointing={said}"])
    plan = make_plan(task_of(cfg, Topology.parse("v5e:2x2")))
    assert {each.rung for each in plan.candidates} == rungs
    assert plan.chosen is not None


def test_a_plan_without_a_host_takes_offload_where_it_is_asked_for_alone() -> None:
    def rungs(topology: str, *overrides: str) -> tuple[str, ...]:
        cfg = read_recipe(find_recipe("llama"), list(overrides))
        task = task_of(cfg, Topology.parse(topology))
        assert make_plan(task).chosen is not None
        return task.rungs

    assert "offload" in rungs("v5e:2x2")
    assert "offload" not in rungs("cpu:4")
    assert "offload" not in rungs("v5e:2x2", "execution.train=compile")
    assert rungs("cpu:4", "model.activation_checkpointing=offload") == ("offload",)


@pytest.mark.parametrize(
    ("given", "degrees"),
    [
        ({"shard": 2, "tensor": 2}, {"shard": 2, "tensor": 2}),
        ({"tensor": 2, "shard": -1}, {"shard": 2, "tensor": 2}),
        ({"context": 4}, {"context": 4}),
        ({"replicate": 4}, {"replicate": 4}),
    ],
)
def test_a_plan_holds_to_the_degrees_of_the_recipe(given: dict[str, int], degrees: dict[str, int]) -> None:
    cfg = read_recipe(find_recipe("llama"), [f"parallel.{name}={degree}" for name, degree in given.items()])
    plan = make_plan(task_of(cfg, Topology.parse("v6e:2x2")))
    assert plan.chosen is not None
    assert plan.chosen.layout.degrees == dict.fromkeys(DEGREES, 1) | degrees
    assert {tuple(each.layout.degrees.values()) for each in plan.candidates} == {
        tuple(plan.chosen.layout.degrees.values())
    }
    is_said = "the times of context parallelism were not checked" in "\n".join(lines(plan))
    assert is_said == ("context" in given)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["parallel.shard=3"],
            r"parallel.shard=3: expected degrees that multiply to the 4 devices of v6e:2x2",
        ),
        (["parallel.shard=8"], r"parallel.shard=8: expected degrees that multiply to the 4 devices"),
        (["parallel.tensor=4"], r"parallel.tensor=4: llama-5m can be divided by 1, 2"),
        (
            ["parallel.context=4", "data.sequence_length=12", "batch.tokens=768"],
            r"parallel.context=4: a sequence of 12 tokens does not divide: expected a multiple of 8",
        ),
        (
            ["execution.train=captured"],
            r"execution.train=captured: expected fused, strict, debug, compile with 4",
        ),
        (
            ["execution.train=compile", "parallel.tensor=2", "parallel.shard=2"],
            r"execution.train=compile: expected .* with parallel.context or parallel.tensor",
        ),
    ],
)
def test_a_plan_refuses_what_a_run_would_refuse(overrides: list[str], said: str) -> None:
    cfg = read_recipe(find_recipe("llama"), overrides)
    with pytest.raises(UserError, match=said):
        make_plan(task_of(cfg, Topology.parse("v6e:2x2")))


def test_a_plan_refuses_context_parallelism_of_a_model_that_does_not_take_parts() -> None:
    cfg = read_recipe(find_recipe("digits"), ["parallel.context=4"])
    with pytest.raises(
        UserError, match=r"^parallel.context=4: Vit does not take position_ids: expected forw"
    ):
        make_plan(task_of(cfg, Topology.parse("v6e:2x2")))


def test_compiled_steps_are_not_divided_by_tensor_parallelism() -> None:
    cfg = read_recipe(find_recipe("llama"), ["execution.train=compile", "batch.tokens=2048"])
    plan = make_plan(task_of(cfg, Topology.parse("v6e:4x4")))
    assert {each.layout.degrees["tensor"] for each in plan.candidates} == {1}


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


def test_a_plan_of_compiled_steps_has_no_context_parallelism() -> None:
    said = ["execution.train=compile", "data.sequence_length=1024", "batch.tokens=8192"]
    plan = make_plan(task_of(read_recipe(find_recipe("llama"), said), Topology.parse("v6e:2x2")))
    assert {each.layout.degrees["context"] for each in plan.candidates} == {1}


def test_degrees_that_slices_cannot_have_are_refused_with_what_they_can() -> None:
    cfg = read_recipe(find_recipe("llama"), ["parallel.shard=8"])
    with pytest.raises(UserError, match="slices are replicas: replicate is a multiple of 2"):
        make_plan(task_of(cfg, Topology.parse("2x v6e:2x2")))


def test_the_parts_of_the_memory_are_all_of_it() -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    assert plan.chosen is not None
    memory = plan.chosen.memory
    assert memory is not None
    parts = [getattr(memory, name) for name, _ in (*ARGUMENTS, *GRADIENTS, *TEMPORARIES)]
    assert sum(parts) == pytest.approx(memory.total)


def test_the_command_prints_a_plan_its_json_and_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["plan", "llama", "--topology", "v5e:2x2"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("llama-5m, 5,048,576 parameters")
    assert main([*arguments, "model.num_hidden_layers=2"]) == 0
    assert capsys.readouterr().out.startswith("llama-5m with num_hidden_layers=2, 3,")
    assert main([*arguments, "model.num_hidden_layers=4"]) == 0  # as its name says
    assert capsys.readouterr().out.startswith("llama-5m, 5,048,576 parameters")
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["topology"] == "v5e:2x2"
    file = tmp_path / "plan.html"
    assert main([*arguments, "--html", str(file)]) == 0
    assert f"{file}: the plan, " in capsys.readouterr().err
    assert Page(file.read_text()).svgs
    with open("/dev/full", "w") as full, redirect_stdout(full):
        assert main([*arguments, "--html", str(file)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-2].startswith(f"{file}: the plan, ")
    assert said[-1].startswith(
        "tputrain: standard output: No space left on device; the result is not written"
    )
    assert main([*arguments, "--html", "/dev/full"]) == 2
    printed = capsys.readouterr()
    assert printed.out.startswith("llama-5m, ")
    assert "/dev/full: cannot be written (No space left on device)" in printed.err
    assert main(["plan", "llama", "--topology", "v6e:3x3"]) == 2
    said = capsys.readouterr()
    assert not said.out
    assert said.err.splitlines()[-1].startswith("tputrain: topology 'v6e:3x3'")


if __name__ == "__main__":
    for name, topology, rows, sequence in CASES:
        found = planned(name, topology, rows, sequence).as_json(num_candidates=4)
        golden_file(name, topology).write_text(json.dumps(found, indent=1) + "\n")


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
