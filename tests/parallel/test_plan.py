"""Plans: which layout is chosen, and how it is reported.

`python -m tests.parallel.test_plan` writes the golden files anew.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel.planned_models import plan_of_recipe, planned, workload
from tputrain.parallel.candidate import Task, candidates
from tputrain.parallel.layout import Layout, layouts, mesh_of
from tputrain.parallel.plan_report import ARGUMENTS, GRADIENTS, TEMPORARIES, lines, picture
from tputrain.parallel.topology import Topology
from tputrain.report.plan_page import plan_page

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


def golden_file(name: str, topology: str) -> Path:
    return GOLDEN / f"{name}-{topology.replace(':', '-').replace(' ', '')}.json"


@pytest.mark.parametrize(("name", "topology", "rows", "sequence"), CASES)
def test_a_plan_is_that_of_its_golden_file(name: str, topology: str, rows: int, sequence: int) -> None:
    found = planned(name, topology, rows, sequence).as_json(num_candidates=4)
    assert found == json.loads(golden_file(name, topology).read_text())


def test_thin_shards_cost_time() -> None:
    found = planned("llama-8b", "v5p:16x16x16", 4096, 2048)
    assert found.chosen is not None
    assert 4096 / found.chosen.layout.degrees["shard"] >= 16  # all weights but those of keys and values
    assert "without replicas the step would take" in "".join(found.why)


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


def test_what_bounds_a_step_is_its_largest_share() -> None:
    plan = plan_of_recipe("instruct", "v6e:4x4")
    said = list(lines(plan))
    (step,) = [number for number, line in enumerate(said) if line.startswith("step ")]
    shares = [each.rpartition(" ") for each in said[step + 1].strip().split(", ")]
    percents = [int(share.rstrip("%")) for _, _, share in shares]
    assert percents == sorted(percents, reverse=True)
    assert len(percents) > 3
    assert said[step].endswith(f"; bound by {shares[0][0]}")
    assert "8 replicas in a slice, each with all parameters: no layer is gathered" in plan.why


def test_a_plan_for_processes_of_a_cpu_has_no_mfu() -> None:
    plan = plan_of_recipe("digits", "cpu:2")
    said = "\n".join(lines(plan))
    assert "2 processes" in said
    assert "rows/s a process" in said
    assert "MFU" not in said
    assert "MFU" not in plan_page(plan)
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


def test_the_memory_and_time_of_several_kinds_are_sums_over_the_layers() -> None:
    task = Task(workload("llama-8b", 4096), Topology.parse("v5p:4x4x4"), 64, 64)

    def found(rung: str) -> tuple[float, float]:
        asked = replace(task, rungs=(rung,), degrees={"replicate": 1, "shard": 64, "context": 1, "tensor": 1})
        (candidate, *_) = candidates(asked)
        assert candidate.code == "slower"  # than the best: it can be run
        assert candidate.memory is not None
        assert candidate.seconds is not None
        return candidate.memory.kept, candidate.seconds.recomputed

    (most, _), (least, again), (products, in_part) = map(found, ("none", "layers", "products"))
    assert found("layers,none") == pytest.approx(((most + least) / 2, again / 2))
    assert found("none,products,none,none") == pytest.approx(((3 * most + products) / 4, in_part / 4))


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


def test_the_parts_of_the_memory_are_all_of_it() -> None:
    plan = planned("llama-1b", "v5e:2x2", 64, 2048)
    assert plan.chosen is not None
    memory = plan.chosen.memory
    assert memory is not None
    parts = [getattr(memory, name) for name, _ in (*ARGUMENTS, *GRADIENTS, *TEMPORARIES)]
    assert sum(parts) == pytest.approx(memory.total)


if __name__ == "__main__":
    for name, topology, rows, sequence in CASES:
        found = planned(name, topology, rows, sequence).as_json(num_candidates=4)
        golden_file(name, topology).write_text(json.dumps(found, indent=1) + "\n")


def test_the_bytes_of_collectives_are_those_of_the_layout() -> None:
    """2 replicas of 8 shards: parameters are gathered twice and gradients scattered once, by micro-batch."""
    plan = planned("llama-1b", "v5e:4x4", 64, 2048)
    (found,) = [
        each
        for each in plan.candidates
        if each.layout.degrees == {"replicate": 2, "shard": 8, "tensor": 1, "context": 1}
        and each.rung == "layers"
        and each.layout.describe("shard") == "x (2 of 4) x y"
    ]
    parameters, itemsize = plan.task.workload.num_parameters, 4
    gathered = plan.task.precision.gathered or itemsize
    moved = found.moved(plan.task)
    assert moved.shard == pytest.approx(
        found.micro_batches * parameters * (2 * gathered + itemsize) * 7 / 8, rel=1e-6
    )
    assert moved.replicate == pytest.approx(found.micro_batches * 2 * parameters * itemsize / 8 / 2, rel=1e-6)
    assert (moved.tensor, moved.context, moved.dcn) == (0, 0, 0)


def test_what_is_computed_again_is_summed_again_by_the_layers_that_are() -> None:
    plan = planned("llama-8b", "v6e:4x4", 64, 2048)
    found = next(each for each in plan.candidates if each.layout.degrees["tensor"] == 4 and each.rows == 16)

    def summed(rung: str) -> float:
        return replace(found, rung=rung).moved(plan.task).tensor

    assert summed("products") == summed("none") == summed("products,none")
    assert summed("layers,none") == pytest.approx((summed("layers") + summed("none")) / 2)
    assert summed("layers") > summed("none")


def test_a_scatter_that_is_an_all_reduce_moves_twice_as_much() -> None:
    plan = planned("llama-8b", "v6e:16x16", 256, 2048)
    (one,) = {
        each.moved(plan.task).shard
        for each in plan.candidates
        if each.layout.degrees["shard"] == 256 and each.rung == "layers"
    }
    parameters, gathered = plan.task.workload.num_parameters, plan.task.precision.gathered
    assert one == pytest.approx(parameters * (2 * gathered + 2 * 4) * 255 / 256, rel=1e-6)
