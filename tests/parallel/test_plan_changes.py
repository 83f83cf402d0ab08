"""What would make a plan fit, or make it faster: each change can be followed."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.parallel.planned_models import plan_of_recipe, planned, workload
from tputrain.figures import memory_text, seconds_text
from tputrain.parallel.candidate import Task
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.plan import Plan, make_plan
from tputrain.parallel.plan_report import lines
from tputrain.parallel.topology import CHIPS, Topology
from tputrain.parallel.variants import Settings, Variant
from tputrain.planning.recipe_variants import RecipeVariants
from tputrain.report.plan_page import plan_page

MASTERS = "optim.master_weights=true"
COMPILED = "execution.train=compile"
"""Steps that neither context nor tensor ranks divide."""
LLAMA_8B = ("model.name=llama-8b", "execution.autocast=bfloat16")


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


def test_a_batch_that_does_not_divide_names_one_that_does() -> None:
    plan = make_plan(Task(workload("llama-1b", 2048), Topology.parse("v5e:16x16"), 7))
    assert plan.chosen is None
    message = plan.refusal()
    assert "7 sequences a step do not divide among its devices; what would fit: a multiple of " in message


@pytest.mark.parametrize(
    ("recipe", "topology", "overrides"),
    [
        ("llama", "3x v5e:2x2", ("batch.tokens=65536",)),
        ("llama", "v6e:4x4", ("batch.tokens=1152", "batch.sequences=9")),
        ("digits", "v6e:16x16", ()),
    ],
)
def test_a_batch_that_is_named_can_be_set_and_divides(
    recipe: str, topology: str, overrides: tuple[str, ...]
) -> None:
    plan = plan_of_recipe(recipe, topology, *overrides)
    assert plan.chosen is None
    (change,) = plan.changes
    settings, others, _ = change.partition(" (another batch: it trains otherwise)")
    assert settings.startswith("batch.")
    assert others
    assert plan_of_recipe(recipe, topology, *overrides, *settings.split()).chosen is not None


def test_changes_are_planned_once_and_where_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, of = [], RecipeVariants.of

    def counted(variants: RecipeVariants, task: Task, settings: Settings) -> Variant | None:
        tried.append(settings)
        return of(variants, task, settings)

    monkeypatch.setattr(RecipeVariants, "of", counted)
    plan = plan_of_recipe("digits", "v6e:4x4")
    assert not tried
    changes = plan.changes
    count = len(tried)
    assert count > 0
    text, page = "\n".join(lines(plan)), plan_page(plan)
    assert all(change in text and change in page for change in changes)
    assert plan.as_json()["changes"] == changes
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


def test_a_long_sequence_is_divided_unless_a_compiled_step_is_asked_for() -> None:
    sizes = ("model.name=llama-405b", "execution.autocast=bfloat16", "batch.tokens=16777216")
    divided = plan_of_recipe("llama", "v5p-2048", *sizes, "data.sequence_length=131072")
    assert divided.chosen is not None
    assert divided.chosen.layout.degrees["context"] == 16
    plan = plan_of_recipe("llama", "v5p-2048", *sizes, COMPILED, "data.sequence_length=131072")
    assert plan.chosen is None
    setting, *others = plan.changes[0].split()
    assert setting == "execution.train=fused"
    assert "parallel.context=16" in others


def test_masters_are_named_before_other_steps_and_with_what_they_need() -> None:
    sizes = ("execution.autocast=bfloat16", COMPILED, "data.sequence_length=32768")
    rows = "batch.tokens=1048576", "batch.sequences=32"
    small = plan_of_recipe("llama", "v6e:4x4", "model.name=llama-8b", *sizes, *rows)
    assert small.changes[0] == MASTERS
    assert (
        plan_of_recipe("llama", "v6e:4x4", "model.name=llama-8b", *sizes, *rows, MASTERS).chosen is not None
    )
    rows = "batch.tokens=2097152", "batch.sequences=64"
    large = plan_of_recipe("llama", "v5e:8x8", "model.name=llama-70b", *sizes, *rows)
    assert large.changes[0].startswith(f"{MASTERS}, and other chips: ")


def test_fused_steps_are_named_where_they_are_shorter_than_compiled_ones() -> None:
    sizes = ("model.name=llama-1b", "execution.autocast=bfloat16", "data.sequence_length=32768")
    rows = "batch.tokens=524288", "batch.sequences=16"
    plan = plan_of_recipe("llama", "v6e:4x4", *sizes, *rows, COMPILED)
    (change,) = [each for each in plan.changes if each.startswith("execution.train=fused: a step ")]
    followed = plan_of_recipe("llama", "v6e:4x4", *sizes, *rows)
    assert followed.chosen is not None
    assert followed.chosen.seconds is not None
    assert seconds_text(followed.chosen.seconds.total) in change
    assert not [each for each in followed.changes if "execution.train" in each]


def _of_whole_sequences(plan: Plan) -> Plan:
    """Of a model that takes no parts of one."""
    workload = replace(plan.task.workload, context_degrees=(1,))
    return make_plan(replace(plan.task, workload=workload, variants=None))


def test_a_shorter_sequence_is_named_where_no_ranks_divide_it() -> None:
    sizes = ("model.name=llama-405b", "execution.autocast=bfloat16", "batch.tokens=16777216")
    plan = _of_whole_sequences(plan_of_recipe("llama", "v5p-2048", *sizes, "data.sequence_length=131072"))
    figures = re.search(r"takes ([\d.]+) GiB a device, which has ([\d.]+) GiB", plan.refusal())
    assert figures is not None
    assert float(figures[1]) > float(figures[2])
    assert plan.changes[0].startswith("data.sequence_length=8192 in place of 131072")
    assert plan_of_recipe("llama", "v5p-2048", *sizes, "data.sequence_length=8192").chosen is not None


def test_other_chips_are_those_that_fit_and_are_not_much_slower() -> None:
    overrides = (*LLAMA_8B, "data.sequence_length=131072", "batch.tokens=4194304")
    plan = _of_whole_sequences(plan_of_recipe("llama", "v5e:4x4", *overrides))
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
    (change,) = [each for each in plan.changes if "twice the rows" not in each]
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


def _seconds(plan: Plan) -> float:
    assert plan.chosen is not None
    assert plan.chosen.seconds is not None
    return plan.chosen.seconds.total


def test_few_rows_are_told_what_twice_as_many_cost() -> None:
    """Weights are read once for all rows of a device."""

    def plan(rows: int) -> Plan:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(8192, 8192, dtype=torch.bfloat16) for _ in range(8)))

        def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
            features = torch.empty(size, 8192, dtype=torch.bfloat16, device="meta")
            return features, features

        found = workload_of(model, batch, loss_fn=lambda output, target: (output - target).square().mean())
        return make_plan(Task(found, Topology.parse("v6e:1x1"), rows))

    few, twice = plan(4), plan(8)
    assert _seconds(twice) / _seconds(few) - 1 < 0.005
    assert "a larger batch: twice the rows in a step no longer" in few.changes
    assert not [change for change in plan(65_536).changes if "twice the rows" in change]


def test_twice_the_batch_is_named_as_the_recipe_has_it() -> None:
    plan = plan_of_recipe("llama", "v6e:16x16", *LLAMA_8B, "data.sequence_length=1024", "batch.tokens=262144")
    (change,) = [each for each in plan.changes if "twice the rows" in each]
    settings = change.split(":")[0]
    assert settings == "batch.tokens=524288"
    other = plan_of_recipe("llama", "v6e:16x16", *LLAMA_8B, "data.sequence_length=1024", settings)
    growth = _seconds(other) / _seconds(plan) - 1
    assert change.endswith(f"{growth:.0%} longer")


def test_sequences_that_are_padded_are_told_what_that_costs() -> None:
    for length, padded, more in (
        (1000, 1024, "5% more scores (tiles are 8 x 128)"),
        (2176, 2560, "38% more scores (a kernel's blocks)"),
    ):
        sizes = f"data.sequence_length={length}", f"batch.tokens={length * 1024}"
        plan = plan_of_recipe("llama", "v6e:4x4", *LLAMA_8B, *sizes)
        said = f"sequences of {length}: attention computes {padded} tokens, {more}"
        assert f"{said}; {padded} would be used in full" in plan.changes
