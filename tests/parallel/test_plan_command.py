"""Plans of recipes, as `tputrain plan` makes and prints them, and their page."""

import json
import re
from contextlib import redirect_stdout
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests.parallel.planned_models import planned
from tputrain.cli import main
from tputrain.cli.plan import task_of
from tputrain.errors import UserError
from tputrain.parallel.config import DEGREES
from tputrain.parallel.layout import mesh_of
from tputrain.parallel.plan import make_plan
from tputrain.parallel.topology import GIB, Topology
from tputrain.planning.compiled_report import compiled_lines
from tputrain.planning.compiled_step import CollectiveSum, CompiledStep
from tputrain.planning.peak import Buffer, Peak
from tputrain.recipe import read_recipe
from tputrain.report.plan_page import plan_page
from tputrain.shipped import find_recipe


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
    assert f"{plan.chosen.mfu:.1%}" in seen.text.splitlines()
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
        host=3 * GIB,
        peak=Peak(19 * GIB, "loss", (Buffer("forward lm_head", "dot_general", "bf16[9,7]", 2, 17 * GIB),)),
    )
    plan = make_plan(named)
    page = plan_page(plan, step)
    assert "<b>mine" not in page
    seen = Page(page)
    for text in (
        "1 s ±15%",
        "forward model.layers.*: dot_general",
        "all-gather",
        "24.0 GiB",
        "40%",
        "all others",
        "60%",
        "17.0 GiB",
        "bf16[9,7]",
    ):
        assert text in seen.text, text
    assert "In the host's memory 3.00 GiB a device by the compiler" in seen.text
    assert "        in the host's memory 3.00 GiB a device" in compiled_lines(plan, step)
    assert "temporaries: 20.0 GiB" in seen.titles
    assert "waiting for collectives (modelled): 100 ms" in seen.titles


@pytest.mark.parametrize(
    ("said", "rungs"),
    [
        ("null", {"none", "products", "layers", "offload"}),
        ("false", {"none"}),
        ("products", {"products"}),
        ("[layers, none]", {"layers,none"}),
    ],
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


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["parallel.shard=3"],
            r"parallel.shard=3: expected degrees that multiply to the 4 devices of v6e:2x2",
        ),
        (["parallel.shard=2"], r"parallel.shard=2: expected .* \(with parallel.replicate=2 they do\)"),
        (["parallel.shard=8"], r"parallel.shard=8: expected degrees that multiply to the 4 devices"),
        (["parallel.context=2"], r"the 4 devices of v6e:2x2 \(with parallel.shard=2 they do\), or none"),
        (["parallel.context=3"], r"the 4 devices of v6e:2x2, or none of them"),
        (
            ["parallel.tensor=4"],
            r"parallel.tensor=4: .*k_proj has 2 heads of 64: expected a number that 4 div",
        ),
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


def test_a_plan_of_compiled_steps_has_no_context_parallelism() -> None:
    said = ["execution.train=compile", "data.sequence_length=1024", "batch.tokens=8192"]
    plan = make_plan(task_of(read_recipe(find_recipe("llama"), said), Topology.parse("v6e:2x2")))
    assert {each.layout.degrees["context"] for each in plan.candidates} == {1}


def test_degrees_that_slices_cannot_have_are_refused_with_what_they_can() -> None:
    cfg = read_recipe(find_recipe("llama"), ["parallel.shard=8"])
    with pytest.raises(UserError, match="slices are replicas: replicate is a multiple of 2"):
        make_plan(task_of(cfg, Topology.parse("2x v6e:2x2")))


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
