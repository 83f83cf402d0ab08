"""Plans that the TPU compiler judges: the step without values, and what is read out of its program."""

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from torch import nn

from tests.parallel.compiled_plan import SLICES, TOPOLOGY
from tests.tpu.test_compile import needs_compiler
from tpu_backend import ahead_of_time, hlo
from tpu_backend.runtime.described import NoArray
from tpu_backend.runtime.transfer import copy
from tputrain import device as devices
from tputrain.cli import main
from tputrain.config import RunConfig
from tputrain.errors import UserError
from tputrain.models import llama
from tputrain.parallel.candidate import Modelled
from tputrain.parallel.layout import Group, Layout, Stretch
from tputrain.parallel.memory_model import Memory
from tputrain.parallel.step_schedule import KINDS, Origin, Schedule, Spent, schedule
from tputrain.parallel.topology import GIB, Topology
from tputrain.planning import compiled_step
from tputrain.planning.abstract_step import LOSS, ONCE, AbstractStep
from tputrain.planning.compiled_step import DoesNotFitError, shorten
from tputrain.planning.peak import Buffer, Peak
from tputrain.signals import Terminated

ROOT = Path(__file__).parents[2]
RECIPE = """
include: [model/llama-5m, optim/adamw]
model: {vocab_size: 512, hidden_size: 128, intermediate_size: 256, num_hidden_layers: 2,
        num_attention_heads: 2, num_key_value_heads: 1}
data: {sequence_length: 128, vocab_size: 512}
batch: {tokens: 2048, sequences: 16}
execution: {autocast: bfloat16}
"""


def started(*arguments: str) -> "subprocess.Popen[str]":
    """A process of its own: it stands for a rank of a slice."""
    paths = [str(ROOT / "backend"), str(ROOT)]
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TPU_PLATFORM": "cpu"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: "subprocess.Popen[str]", seconds: float) -> tuple[str, str]:
    """Its output, and what it said on standard error."""
    try:
        output, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    assert "Warning" not in errors
    return output, errors


@needs_compiler
def test_ranks_record_one_program_that_trains_every_parameter_and_reads_no_value() -> None:
    processes = [started("tests.parallel.compiled_plan", rank, TOPOLOGY) for rank in ("0", "3")]
    first, last = (json.loads(ended(each, 300)[0].splitlines()[-1]) for each in processes)
    assert (first["world_size"], first["backend"]) == (4, "tpu")
    assert first["digest"] == last["digest"]
    assert first["digests"] == last["digests"]
    assert len(set(first["digests"])) == 3  # a program for each layout
    assert first["segments"] == 1
    assert first["joined"] == []
    # Each parameter and AdamW's two moments are replaced in place, with activation checkpointing too.
    assert first["donated"] == 3 * first["parameters"]
    assert first["masters"] == [1, 4 * first["parameters"]]
    labels = Counter[str]()
    lines = defaultdict(set)
    for name, count in first["labels"].items():
        label, _, line = name.partition(", ")
        labels[label] += count
        lines[label].add(line)
    for layer in ("self_attn.q_proj", "mlp.up_proj"):
        for walk in ("forward", "again", "backward"):
            assert all(labels[f"{walk} model.layers.{number}.{layer}"] > 0 for number in (0, 1))
    # The head and the loss are one operation, as in a run. Its gradient is the first that is divided.
    assert first["losses"] == [[1, 2]] * 2  # with the gradients of its input and of its weight
    for head, *layers, embeddings in first["scattered"]:
        assert head == 512 * 128 // 4
        assert len(layers) == 2
        assert embeddings > head
    assert all(labels[name] > 0 and lines[name] == {""} for name in (LOSS, *ONCE))
    # Queries, keys and values share their input, and gate and up theirs: its gradient is summed once.
    num_layers = 2
    summed = num_layers * (2 + 2) + 2  # forward and backward; the embedding and the head
    assert first["summed"] == [summed] * 2 + [summed + num_layers] * 4  # what attention gives, again
    # Lines are those of the model: of the forward pass in each pass.
    source = Path(llama.__file__).read_text().splitlines()
    for walk in ("forward", "again", "backward"):
        (line,) = lines[f"{walk} model.layers.1.self_attn.q_proj"]
        file, _, number = line.partition(":")
        assert file == "llama.py"
        assert "self.q_proj(" in source[int(number) - 1]
    assert first["refusal"].startswith("Reading: cannot be compiled without running it")
    assert "compiled_plan.py:" in first["refusal"]
    assert "hidden.sum().item()" in first["refusal"]


@needs_compiler
def test_ranks_of_two_slices_record_one_program() -> None:
    processes = [started("tests.parallel.compiled_plan", rank, SLICES) for rank in ("0", "7")]
    first, last = (json.loads(ended(each, 300)[0].splitlines()[-1])["digests"] for each in processes)
    assert first == last
    assert len(set(first)) == 2


@needs_compiler
def test_the_compilers_word_is_in_the_plan(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    command = ["tputrain", "plan", str(recipe), "--topology", TOPOLOGY, "--compile", "--json"]
    output, said = ended(started(*command), 240)
    found = json.loads(output)
    assert f"recording the whole step for {TOPOLOGY} ..." in said
    assert f"compiling the whole step for {TOPOLOGY} (expect 1 to 5 minutes on two cores) ..." in said
    compiled, model = found["compiled"], found["chosen"]["memory_gib"]["arguments"] * 2**30
    assert compiled["depth"] == "the whole step"
    # Besides the batch, and rows of norms that are filled up to a tile.
    assert model <= compiled["arguments"] < 1.3 * model + 2**18
    assert 0 < compiled["temporaries"] < 2**28
    assert compiled["peak"] is None  # so few are on the chip
    assert compiled["flops"] > 0
    assert compiled["estimated"] > 0.5 * compiled["seconds"] > 0
    moved = {each["kind"]: each for each in compiled["collectives"]}
    assert any("scatter" in kind for kind in moved)
    assert moved["all-gather"]["axes"] == "shard"
    # Most parameters at least once, as bfloat16.
    assert moved["all-gather"]["num_bytes"] > 0.8 * 2 * found["parameters"]
    assert any(
        re.match(r"forward model\.layers\.\*.*, llama\.py:\d+: ", name) for name, _ in compiled["parts"]
    )
    assert any(re.match(r"backward .*, llama\.py:\d+: ", name) for name, _ in compiled["parts"])


# -- without the compiler


def test_without_a_compiler_the_model_answers_and_a_line_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(devices.of_slices(), "compiler_version", lambda: None)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    assert main(["plan", str(recipe), "--topology", TOPOLOGY, "--compile"]) == 0
    printed = capsys.readouterr().out
    assert "MFU" in printed
    assert "not compiled: libtpu, its compiler, is not installed: pip install 'tputrain[tpu]'" in printed


WANTED = ["jaxlib<=0.10.2", "libtpu==0.0.42.*; extra == 'tpu'", "libtpu==0.0.1; extra == 'other'"]
DIFFERS = (
    "jax 0.10.2 asks for libtpu==0.0.42.*, and libtpu 0.0.30 is installed: pip install 'jax[tpu]==0.10.2'"
)


@pytest.mark.parametrize(("installed", "said"), [("0.0.42.1", None), ("0.0.30", DIFFERS), (None, None)])
def test_a_libtpu_that_jax_does_not_ask_for_is_named(
    installed: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_of_time, "compiler_version", lambda: installed)
    monkeypatch.setattr(ahead_of_time, "version", lambda name: {"jax": "0.10.2"}[name])
    monkeypatch.setattr(ahead_of_time, "requires", lambda name: {"jax": WANTED}[name])
    assert ahead_of_time.mismatch() == said


def test_a_mismatch_is_said_before_the_compiler_is_asked_and_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(**_: Any) -> Any:
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: no\nmore")

    monkeypatch.setattr(ahead_of_time, "find_spec", lambda name: name)
    monkeypatch.setattr(topologies, "get_topology_desc", unknown)
    monkeypatch.setattr(ahead_of_time, "mismatch", lambda: None)
    with pytest.raises(ValueError, match=r"unknown topology 'v5e:9x9': INVALID_ARGUMENT: no$"):
        ahead_of_time.chips("v5e:9x9")
    monkeypatch.setattr(ahead_of_time, "mismatch", lambda: DIFFERS)
    with pytest.raises(RuntimeError) as error:
        ahead_of_time.chips("v5e:9x9")
    assert str(error.value) == f"{DIFFERS}; with these versions: INVALID_ARGUMENT: no"
    refusal = compiled_step._refusal(RuntimeError("INTERNAL: no"), "the whole step")
    assert str(refusal) == f"the TPU compiler refuses the step (the whole step): INTERNAL: no; {DIFFERS}"
    monkeypatch.setattr(ahead_of_time, "start", lambda name: print(f"asked for {name}"))
    compiled_step.start_slice(Topology.parse(TOPOLOGY))
    assert capsys.readouterr().out.splitlines() == [f"note: {DIFFERS}", f"asked for {TOPOLOGY}"]
    step = compiled_step._Compiled(defaultdict(float), ("one",), None, 1.0, 1.0)
    assert compiled_step._step(step, compiled_step._depth(Deep(1))).notes == ("one", DIFFERS)


def test_a_note_says_how_long_a_run_compiles_all_layers() -> None:
    few = compiled_step._Compiled(defaultdict(float), (), None, 1.0, 300.0)
    (note, *_) = compiled_step._step(few, compiled_step._depth(Deep(*(1,) * 24))).notes
    assert note.startswith("a run compiles all 24 layers: about 15 minutes at this machine's pace; ")
    assert "(execution.first_steps)" in note


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ([4], None),
        ([20, 9], "fits: 9.00 GiB a device, by the compiler"),
        ([None, 18, 9], "fits: 9.00 GiB a device, by the compiler"),
        ([20, 18, 16, 16], "3 smaller plans do not fit either; the last one needs 16.0 GiB a device: "),
        ([20_000], "no plan of this slice is small enough by the compiler's figures"),
    ],
)
def test_a_plan_that_the_compiler_finds_too_large_comes_with_one_that_was_compiled_too(
    sizes: list[int | None],
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """`sizes`: GiB of the plan and of those that are tried; None: the compiler stops."""
    asked: list[tuple[object, ...]] = []

    def compile_step(subject: compiled_step.Subject, modelled: Any) -> compiled_step.CompiledStep:
        cfg = subject.cfg
        rows = subject.batch["input_ids"].shape[0]
        assert rows * cfg.trainer.accumulate == 16
        (rung,) = {layer.recomputes for layer in subject.make_model().model.layers}
        asked.append((rows, rung, cfg.parallel.replicate, cfg.parallel.tensor))
        size = sizes[len(asked) - 1]
        if size is None:
            raise DoesNotFitError(20 * GIB, "the whole step")
        return compiled_step.CompiledStep(
            size * GIB,
            0.0,
            1.0,
            0.0,
            0.0,
            0.0,
            1e12,
            (),
            (),
            ("the whole step",),
            1.0,
            1.0,
            "libtpu",
            ("the turns of loops are not known, each counts once: 1 in backward",),
        )

    monkeypatch.setattr("tputrain.cli.plan.why_not", lambda topology: None)
    monkeypatch.setattr("tputrain.cli.plan.start_slice", lambda topology: None)
    monkeypatch.setattr("tputrain.planning.judged.compile_step", compile_step)
    monkeypatch.setattr("tputrain.cli.plan.largest_of_a_layer", lambda subject: "with 1 of 2 layers: scores")
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    assert main(["plan", str(recipe), "--topology", TOPOLOGY, "--compile"]) == 0
    printed = capsys.readouterr().out
    assert ("note    the turns of loops are not known" in printed) == (sizes[0] is not None)
    assert ("DOES NOT FIT" in printed) == (sizes[0] is not None and sizes[0] > 16)
    why_not = "not compiled: the compiler needs 20.0 GiB for it (the whole step); with 1 of 2 layers: scores"
    assert (why_not in printed) == (sizes[0] is None)
    assert len(asked) == len(set(asked)) == len(sizes)
    assert said is None or said in printed


SECOND = "parallel.shard=4 model.activation_checkpointing=products batch.sequences=16"


@pytest.mark.parametrize(
    ("budget", "num_compiled", "wins"),
    [
        ("25", 2, SECOND),  # a third would take too long
        ("1", 1, "parallel.shard=4 batch.sequences=16"),  # the plan is always compiled
        ("55", 5, SECOND),
    ],
)
def test_a_search_compiles_within_its_time_and_takes_the_fastest_that_fits_by_the_compiler(
    budget: str,
    num_compiled: int,
    wins: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Each takes 10 s. The second one is faster than the plan, the third does not fit, the fourth fails."""
    clock, seconds = [0.0], [2.0, 1.0, 0.5, 0.0, 3.0]
    compiled: list[compiled_step.Subject] = []

    def compile_step(subject: compiled_step.Subject, modelled: Any) -> compiled_step.CompiledStep:
        clock[0] += 10.0
        compiled.append(subject)
        number = len(compiled) - 1
        if number == 2:
            raise DoesNotFitError(20 * GIB, "the whole step")
        if number == 3:
            raise UserError("the TPU compiler refuses the step: no")
        return compiled_step.CompiledStep(
            GIB, 0.0, seconds[number], 0.0, 0.0, 0.0, 1e12, (), (), "the whole step", 1.0, 1.0, "libtpu"
        )

    monkeypatch.setattr("tputrain.planning.judged.monotonic", lambda: clock[0])
    monkeypatch.setattr("tputrain.cli.plan.why_not", lambda topology: None)
    monkeypatch.setattr("tputrain.cli.plan.start_slice", lambda topology: None)
    monkeypatch.setattr("tputrain.planning.judged.compile_step", compile_step)
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE)
    command = ["plan", str(recipe), "--topology", TOPOLOGY, "--search", budget]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert len(compiled) == num_compiled
    (line,) = [line for line in printed.splitlines() if line.startswith("winner")]
    assert line.endswith(wins)
    assert f"step    {2 if num_compiled == 1 else 1} s +-15%" in printed
    assert ("does not fit: " in printed) == (num_compiled > 2)
    compiled.clear()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["search"]
    assert [each["wins"] for each in found].index(True) == (0 if num_compiled == 1 else 1)
    for text, said in {"0": "0.0", "inf": "inf", "nan": "nan"}.items():
        assert main([*command[:-1], text]) == 2
        assert f"--search={said}: expected seconds, more than 0 and not infinite" in capsys.readouterr().err


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
@pytest.mark.parametrize("num_compiled", [0, 2])
def test_an_interrupted_search_prints_what_it_has(
    interrupt: type[BaseException],
    code: int,
    num_compiled: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    seconds = [2.0, 1.0][:num_compiled]
    left: list[float] = []

    def compile_step(subject: compiled_step.Subject, modelled: Any) -> compiled_step.CompiledStep:
        if not left:
            raise interrupt
        return compiled_step.CompiledStep(
            GIB, 0.0, left.pop(0), 0.0, 0.0, 0.0, 1e12, (), (), "the whole step", 1.0, 1.0, "libtpu"
        )

    monkeypatch.setattr("tputrain.cli.plan.why_not", lambda topology: None)
    monkeypatch.setattr("tputrain.cli.plan.start_slice", lambda topology: None)
    monkeypatch.setattr("tputrain.planning.judged.compile_step", compile_step)
    recipe, page = tmp_path / "tiny.yaml", tmp_path / "plan.html"
    recipe.write_text(RECIPE)
    command = ["plan", str(recipe), "--topology", TOPOLOGY, "--search", "600", "--html", str(page)]
    left[:] = seconds
    assert main(command) == code
    printed = capsys.readouterr()
    assert printed.err.endswith("tputrain: interrupted\n")
    assert page.exists()
    is_there = re.search(r"^search  interrupted after 2 candidates$", printed.out, re.MULTILINE)
    assert (is_there is not None) == (num_compiled == 2)
    why_not = "not compiled: interrupted before the compiler's first result"
    assert (why_not in printed.out) == (num_compiled == 0)
    if num_compiled:
        (line,) = [line for line in printed.out.splitlines() if line.startswith("winner")]
        assert line.endswith(SECOND)
    left[:] = seconds
    assert main([*command, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["interrupted"] == f"interrupted after {num_compiled} candidates"
    assert len(found["search"]) == num_compiled


PROGRAM = (Path(__file__).parent / "step.hlo").read_text()


def test_a_schedule_adds_cycles_loops_and_what_is_waited_for() -> None:
    topology = Topology.parse(TOPOLOGY)
    seconds = {"all-gather": 5e-6, "all-reduce-scatter": 7e-6}
    found = schedule(hlo.program(PROGRAM), topology, lambda each: seconds[each.kind])
    spent = _by_kind(found)
    assert spent["estimated"] == pytest.approx((3000 + 4 * 1500) / 1.5e9)
    # The gather begins first and takes 5 us, of which the fusion hides 2.
    assert spent["waiting"] == pytest.approx(3e-6 + 7e-6)
    assert spent["unestimated"] == pytest.approx(2 * 4 * 2**20 / topology.hbm_bandwidth)  # by its bytes
    assert [each.kind for _, each, _ in found.collectives] == ["all-gather", "all-reduce-scatter"]
    of_product = Spent("forward model.up", Origin("forward model.up", "", "dot_general"), "estimated")
    assert found.spent[of_product] == pytest.approx(2e-6)
    assert found.total == pytest.approx(sum(spent.values()))


def _by_kind(found: Schedule) -> dict[str, float]:
    return {
        kind: sum(seconds for spent, seconds in found.spent.items() if spent.kind == kind) for kind in KINDS
    }


OF_HOST = """ENTRY %main (x: f32[262144]) -> f32[262144] {
  %x = f32[262144]{0} parameter(0)
  %copy-start.1 = (f32[262144]{0:S(5)}, f32[262144]{0}, u32[]{:S(2)}) copy-start(%x)
  %fusion.1 = f32[128]{0} fusion(%x), kind=kLoop, calls=%double, backend_config={"estimated_cycles":"15000"}
  %copy-done.1 = f32[262144]{0:S(5)} copy-done(%copy-start.1)
  %copy-start.2 = (f32[262144]{0}, f32[262144]{0:S(5)}, u32[]{:S(2)}) copy-start(%copy-done.1)
  ROOT %copy-done.2 = f32[262144]{0} copy-done(%copy-start.2)
}
"""


def test_what_the_host_keeps_goes_there_and_back_beside_the_core() -> None:
    topology = Topology.parse(TOPOLOGY)
    found = schedule(hlo.program(OF_HOST), topology, lambda _: 0.0)
    there_and_back = 2 * 2**20 / topology.pcie_bandwidth
    assert _by_kind(found)["estimated"] == pytest.approx(15000 / 1.5e9)
    assert _by_kind(found)["copying"] == pytest.approx(
        there_and_back - _by_kind(found)["estimated"], rel=1e-4
    )


SPARSECORE = """%called_computation.8 (g: f32[128,64], t: token[]) -> f32[32,64] {
  %t = token[] parameter(1)
  %g = f32[128,64]{1,0} parameter(0)
  ROOT %reduce-scatter.1 = f32[32,64]{1,0} reduce-scatter(%g), channel_id=2, replica_groups={{0,1,2,3}}, \
dimensions={0}, to_apply=%add, backend_config={"device_type":"DEVICE_TYPE_SPARSECORE"}
}, execution_thread="sparsecore"

ENTRY %main (g.1: f32[128,64]) -> f32[32,64] {
  %g.1 = f32[128,64]{1,0} parameter(0)
  %reduce-scatter.call-start = ((f32[128,64]{1,0}, token[]), f32[32,64]{1,0}) call-start(%g.1), \
async_execution_thread="sparsecore", to_apply=%called_computation.8
  %fusion.1 = f32[128,64]{1,0} fusion(%g.1), kind=kLoop, calls=%double, \
backend_config={"estimated_cycles":"3500"}
  ROOT %reduce-scatter.call-done = f32[32,64]{1,0} call-done(%reduce-scatter.call-start)
}
"""


def test_collectives_of_the_sparsecore_go_on_beside_the_core() -> None:
    found = schedule(hlo.program(SPARSECORE), Topology.parse("v6e:2x2"), lambda each: 5e-6)
    ((_, collective, _),) = found.collectives
    assert (collective.kind, collective.is_async, collective.num_bytes) == (
        "reduce-scatter",
        True,
        4 * 128 * 64,
    )
    assert _by_kind(found)["estimated"] == pytest.approx(3500 / 1.75e9)
    assert _by_kind(found)["waiting"] == pytest.approx(5e-6 - _by_kind(found)["estimated"])


_NETWORK = """channel_id=1, is_host_transfer=true, frontend_attributes={\
_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_host_transfer_rendezvous="all-reduce.4_0",\
_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2}x{0:3}",\
_xla_megascale_transfer_type="ALL_REDUCE"}"""
TWO_SLICES = f"""ENTRY %main (g: f32[128,64]) -> f32[128,64] {{
  %g = f32[128,64]{{1,0}} parameter(0)
  %begin = token[] after-all()
  %send = (f32[128,64]{{1,0}}, u32[], token[]) send(%g, %begin), {_NETWORK}
  %recv = (f32[128,64]{{1,0}}, u32[], token[]) recv(%begin), {_NETWORK}
  %fusion.1 = f32[128,64]{{1,0}} fusion(%g), kind=kLoop, calls=%double, \
backend_config={{"estimated_cycles":"3500"}}
  %send-done = token[] send-done(%send), channel_id=1, is_host_transfer=true
  %recv-done = (f32[128,64]{{1,0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  ROOT %sum = f32[128,64]{{1,0}} get-tuple-element(%recv-done), index=0
}}
"""


@pytest.mark.parametrize("is_received_first", [False, True])
def test_what_the_network_between_slices_carries_is_waited_for(is_received_first: bool) -> None:
    topology = Topology.parse("2x v6e:2x2")
    layout = Layout(topology, ((1, 1, 2, 1), (1, 1, 2, 1)))
    groups = compiled_step._Groups(layout, [])
    lines = TWO_SLICES.splitlines(keepends=True)
    if is_received_first:
        lines[3:5] = lines[4:2:-1]
        assert "%recv" in lines[3]
    found = schedule(hlo.program("".join(lines)), topology, groups.seconds)
    ((_, collective, seconds),) = found.collectives
    assert (collective.kind, collective.num_slices) == ("all-reduce", 2)
    assert collective.num_bytes == 4 * 128 * 64
    # Each slice sends half of the sum, and receives the other half; then the other way.
    assert seconds == pytest.approx(4 * 128 * 64 / topology.dcn_bandwidth)
    assert _by_kind(found)["estimated"] == pytest.approx(3500 / 1.75e9)
    assert _by_kind(found)["waiting"] == pytest.approx(seconds - _by_kind(found)["estimated"])


KERNELS = """ENTRY %main (q: bf16[12,2048,64]) -> bf16[12,2048,64] {
  %q = bf16[12,2048,64]{2,1,0} parameter(0)
  %splash_mha_dq_no_residuals.1 = (f32[1024,64]{1,0:T(8,128)}, bf16[12,2048,64]{2,1,0:T(8,128)(2,1)S(1)}) \
custom-call(%q, %q, /*index=2*/%q), custom_call_target="tpu_custom_call", \
frontend_attributes={attention="25000000 64 64",kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 1024}"
}}, metadata={op_name="jit(run)/backward model/dq/pallas_call"}
  %theirs = bf16[12,2048,64]{2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  %nothing = bf16[12,2048,64]{2,1,0} custom-call(%q), custom_call_target="AllocateBuffer"
  ROOT %end = bf16[12,2048,64]{2,1,0} get-tuple-element(%splash_mha_dq_no_residuals.1), index=1
}
"""


def test_a_kernel_counts_its_products_and_another_its_bytes() -> None:
    program, topology = hlo.program(KERNELS), Topology.parse("v6e:1x1")
    _, kernel, theirs, nothing, _ = program.computations["main"]
    assert kernel.attention_kernel == hlo.AttentionKernel("dq", 25_000_000, 64, 64)
    assert hlo.AttentionKernel("dkv", 1, 192, 128).products == (192, 128, 128, 192)
    assert kernel.op_name == "jit(run)/backward model/dq/pallas_call"
    assert theirs.is_pallas_kernel
    assert theirs.attention_kernel is None
    assert not nothing.is_pallas_kernel
    found = schedule(program, topology, lambda _: 0.0)
    # A head of 64 fills a quarter of the matrix unit of a v6e.
    seconds = 3 * 2 * 25_000_000 * 64 / (topology.peak_flops / 4 * 0.78)
    moved = 2 * 12 * 2048 * 64 * 2 / topology.hbm_bandwidth
    assert _by_kind(found)["unestimated"] == found.total == pytest.approx(seconds + moved)
    of_kernel = Spent("backward model", Origin("backward model", "", "pallas_call"), "unestimated")
    assert found.spent[of_kernel] == pytest.approx(seconds)
    on_v5e, on_v5p = (
        schedule(program, Topology.parse(name), lambda _: 0.0).spent[of_kernel]
        * Topology.parse(name).peak_flops
        for name in ("v5e:1x1", "v5p:1x1x1")
    )
    assert on_v5e / on_v5p == pytest.approx(0.78 / 0.98)  # v5p has the shares of v6e


def test_a_kernel_takes_as_long_as_the_products_that_its_author_names() -> None:
    estimate = '"cost_estimate":{"flops":"4000000000000","transcendentals":"0"}'
    program = hlo.program(
        "ENTRY %main (x: bf16[8]) -> bf16[8] {\n"
        '  ROOT %gmm = bf16[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", '
        f'backend_config={{"custom_call_config":{{"body":"",{estimate}}}}}\n}}\n'
    )
    topology = Topology.parse("v6e:1x1")
    found = schedule(program, topology, lambda _: 0.0)
    assert found.total == pytest.approx(4e12 / (topology.peak_flops * 0.92))


@pytest.mark.parametrize(
    ("written", "group"),
    [
        ("replica_groups={{0,4,8},{1,5,9}}", (0, 4, 8)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2] {'b'}", (0, 1)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a'}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'c'}, dimensions={0}", (0, 4)),
        ("replica_groups=mesh['a'=8], device_ids=([8]) {'a'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=(0,4,1,5,2,6,3,7) {'b'}", (0, 4)),
        ("replica_groups=mesh['a'=4,'b'=2] {'b','a'}", (0, 2, 4, 6, 1, 3, 5, 7)),
        ("replica_groups=mesh['a'=4,'b'=2] {'a':(2)2}", (0, 2)),
        ("source_target_pairs={{0,1},{1,2}}", (0, 1)),
    ],
)
def test_the_first_group_of_a_collective_is_read(written: str, group: tuple[int, ...]) -> None:
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  ROOT %a = f32[8]{{0}} all-to-all(%x), {written}\n}}\n"
    (found,) = hlo.collectives(text)
    assert found.group == group


def test_a_loop_without_a_note_runs_up_to_the_constant_that_its_counter_is_compared_with() -> None:
    condition = """%until (state: (s32[])) -> pred[] {
  %last = s32[] constant(7)
  %state = (s32[]) parameter(0)
  %counter = s32[] get-tuple-element(%state), index=0
  ROOT %less = pred[] compare(%counter, %last), direction=LT
}
"""
    loop = "  %loop = (s32[]) while(%state), condition=%until, body=%body\n"
    program = hlo.program(condition + "ENTRY %main (s: (s32[])) -> (s32[]) {\n" + loop + "}\n")
    (instruction,) = program.computations["main"]
    assert program.trips(instruction) == 7
    of_values = hlo.program(
        condition.replace("constant(7)", "copy(%other)")
        + "ENTRY %main (s: s32[]) -> s32[] {\n"
        + loop
        + "}\n"
    )
    assert of_values.trips(instruction) is None


def test_a_loop_whose_turns_are_not_known_is_named_and_counts_once() -> None:
    of_values = PROGRAM.replace('"known_trip_count":{"n":"4"}', '"window":4')
    topology = Topology.parse(TOPOLOGY)
    known, unknown = (schedule(hlo.program(text), topology, lambda _: 0.0) for text in (PROGRAM, of_values))
    assert not known.unknown_loops
    assert list(unknown.unknown_loops) == ["while.1"]
    assert known.total - unknown.total == pytest.approx(3 * 1500 / topology.chip.clock)


def test_collectives_are_found_along_the_axes_of_the_mesh() -> None:
    layout = Layout(Topology.parse("v5e:4x4"), ((2, 1, 2, 1), (1, 1, 2, 2)))
    groups = compiled_step._Groups(layout, [(0, rank // 4, rank % 4) for rank in range(16)])
    assert layout.degrees == {"replicate": 2, "shard": 4, "tensor": 2, "context": 1}
    assert groups.axes([0, 1]) == ("tensor",)
    assert groups.axes([0, 2, 4, 6]) == ("shard",)
    assert groups.axes([0, 8]) == ("replicate",)
    assert groups.axes(range(16)) == ("replicate", "shard", "tensor")
    x, y = layout.topology.axes
    assert groups.on_torus([0, 4, 8, 12]) == Group((Stretch(x, 4, 1),))
    assert groups.on_torus([0, 2, 8, 10]) == Group((Stretch(x, 2, 2), Stretch(y, 2, 2)))


def test_a_value_that_is_not_there_is_not_copied() -> None:
    array = NoArray((2,), np.dtype(np.float32))
    assert copy(array) is array


class Deep(nn.Module):
    def __init__(self, *kinds: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8 * kind) for kind in kinds)


@pytest.mark.parametrize(
    ("kinds", "compiled", "times"),
    [
        ((1,) * 32, 4, [1, 15, 15, 1]),
        ((1,) * 5, 4, [1, 1.5, 1.5, 1]),
        ((1,) * 4, 4, [1] * 4),  # no deeper than what is compiled anyway
        ((1, 2) * 16, 8, [1, 1, 7, 7, 7, 7, 1, 1]),  # pairs
        (tuple(range(1, 9)), 8, [1] * 8),  # all differ
    ],
)
def test_layers_between_the_first_and_the_last_one_stand_for_all(
    kinds: tuple[int, ...], compiled: int, times: list[float]
) -> None:
    model = Deep(*kinds)
    depth = compiled_step._depth(model)
    assert depth.compiled == (compiled,)
    assert depth.share_of("layers.*") == compiled / len(kinds)
    shorten(model, depth.compiled)
    found = compiled_step._times(model, depth)
    assert found == {f"layers.{place}": count for place, count in enumerate(times)}
    for place, count in enumerate(times):
        assert compiled_step._of_label(f"again layers.{place}.mlp", found) == count
        assert compiled_step._of_label(f"backward layers.{place}", found) == count
    for label in ("", "loss", "forward", "forward head", "backward layers"):
        assert compiled_step._of_label(label, found) == 1


def test_one_layer_that_is_there_often_is_compiled_as_often() -> None:
    model = Deep()
    model.layers.extend([nn.Linear(8, 8)] * 12)
    assert compiled_step._depth(model).compiled == (12,)


class Towers(nn.Module):
    """48 layers and 4 of another list; or none at all."""

    def __init__(self, is_deep: bool):
        super().__init__()
        self.one, self.other = (Deep(*(1,) * count) for count in ((48, 4) if is_deep else (0, 0)))


@pytest.mark.parametrize("is_deep", [True, False])
def test_memory_and_flops_grow_as_the_model_says(is_deep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def compiled(subject: Any, depth: Any, growth: float) -> compiled_step._Compiled:
        seen.append(growth)
        figures: compiled_step.Figures = defaultdict(float)
        figures |= {("arguments",): 10.0, ("temporaries",): 5.0, ("flops",): 9.0, ("host",): 2.0}
        return compiled_step._Compiled(figures, (), None, 1.0, 1.0)

    def modelled(share_of: Any) -> Modelled:
        assert share_of("other.layers.*") == 1
        share = share_of("one.layers.*")
        sizes = 12 * share, 1 + 24 * share, 0.0, 12 * share, 0.0, 0.0
        own = Memory(*sizes, is_accumulated=False, moment="loss", host=12 * share)
        return Modelled(own, flops_of_layers=24 * share, flops_of_rest=5.0)

    monkeypatch.setattr(compiled_step, "_compiled", compiled)
    layout = Layout(Topology.parse(TOPOLOGY), ((1, 1, 2, 1), (1, 1, 2, 1)))
    subject = compiled_step.Subject(partial(Towers, is_deep), RunConfig(), {}, layout)
    found = compiled_step.compile_step(subject, modelled)
    if not is_deep:
        assert seen == [1]
        assert (found.arguments, found.temporaries, found.flops, found.host) == (10, 5, 9, 2)
        assert found.depth == "the whole step"
        return
    assert seen == [25 / 3]
    assert found.arguments == pytest.approx(10 * 37 / 4)
    assert found.temporaries == pytest.approx(5 + 1.06 * 11)
    assert found.host == 24
    assert found.flops == 5 + 12 * 4  # of 9 the layers have 4, twice what the model knows
    assert found.depth == "4 and 4 of 48 and 4 layers"


def test_ctrl_c_does_not_wait_for_the_compiler() -> None:
    never, errors = threading.Event(), [ValueError("no")]

    def refuses() -> None:
        raise errors[0]

    with pytest.raises(ValueError, match="no"):
        compiled_step._in_thread(refuses)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    began = time.monotonic()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            compiled_step._in_thread(lambda: never.wait(30))
    finally:
        signal.signal(signal.SIGINT, handler)
        never.set()
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("num_segments", [1, 3])
def test_a_step_of_several_programs_is_noted(num_segments: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slices:
        def compile_for(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(as_text=str)

    found = AbstractStep({}, num_segments, 1.0)
    monkeypatch.setattr(compiled_step, "abstract_step", lambda *_: found)
    monkeypatch.setattr(compiled_step, "_figures", lambda *_: (defaultdict(float), ()))
    monkeypatch.setattr(compiled_step, "chips_by_rank", lambda _: [0])
    monkeypatch.setattr(compiled_step, "peak_of", lambda _: Peak(0, "", ()))
    monkeypatch.setattr(devices, "of_slices", Slices)
    monkeypatch.setattr(devices, "program_of", str)
    layout = Layout(Topology.parse(TOPOLOGY), ((1, 1, 2, 1), (1, 1, 2, 1)))
    subject = compiled_step.Subject(partial(Deep, 1), RunConfig(), {}, layout)
    notes = compiled_step._compiled(subject, compiled_step._depth(Deep(1))).notes
    of_programs = ("the step is 3 programs: the figures are of the largest alone",)
    assert notes == (of_programs if num_segments > 1 else ())


@pytest.mark.parametrize("fits", [True, False])
def test_what_takes_most_in_a_layer_is_named(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    buffers = (
        Buffer("again layers.*", "dot_general", "bf16[9,7]", 2, 3 * GIB, "model.py:7"),
        Buffer("", "copy", "f32[8]", 1, 1),
    )

    def compiled(subject: Any, depth: Any) -> compiled_step._Compiled:
        asked.append(depth.compiled)
        if not fits:
            raise DoesNotFitError(20 * GIB, depth.said)
        return compiled_step._Compiled(defaultdict(float), (), Peak(4 * GIB, "", buffers), 1.0, 1.0)

    monkeypatch.setattr(compiled_step, "_compiled", compiled)
    layout = Layout(Topology.parse(TOPOLOGY), ((1, 1, 2, 1), (1, 1, 2, 1)))
    subject = compiled_step.Subject(partial(Deep, *(1,) * 32), RunConfig(), {}, layout)
    named = "with 1 of 32 layers: 3.00 GiB  2 x bf16[9,7] (again layers.*, model.py:7: dot_general)"
    assert compiled_step.largest_of_a_layer(subject) == (named if fits else None)
    assert asked == [(1,)]


@pytest.mark.parametrize(
    "text",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
        "(20.50G) exceeds available HBM (15.75G).",
    ],
)
def test_what_the_compiler_says_of_memory_is_read(text: str) -> None:
    found = compiled_step._refusal(RuntimeError(text), "4 of 32 layers")
    assert isinstance(found, DoesNotFitError)
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    assert found.used == 20.5 * 2**30
    assert str(found) == "the compiler needs 20.5 GiB for it (4 of 32 layers)"
