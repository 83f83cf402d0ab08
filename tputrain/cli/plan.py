"""`tputrain plan`: whether a recipe fits a slice, how it is laid out there, and how fast a step is."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn

from tputrain.announce import announced
from tputrain.models import ModelConfig, add_lora, parameters_on_meta
from tputrain.models.recompute import OFFLOAD
from tputrain.optim.groups import freeze
from tputrain.parallel.advice import advice
from tputrain.parallel.candidate import Candidate, Task
from tputrain.parallel.memory_model import RUNGS, Precision
from tputrain.parallel.plan import make_plan, refuse
from tputrain.parallel.plan_report import lines
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Workload, workload_of
from tputrain.planning.compiled_report import compiled_lines
from tputrain.planning.compiled_step import Subject, largest_of_a_layer, start_slice, why_not
from tputrain.planning.judged import Judged, change_that_fits, judge_by, search_lines, searched, winner
from tputrain.planning.recipe_variants import RecipeVariants
from tputrain.recipe import RecipeConfig, read_recipe
from tputrain.report.document import write_page
from tputrain.report.plan_page import plan_page
from tputrain.shipped import find_recipe


def plan(
    recipe: str,
    overrides: Sequence[str],
    topology: str,
    output: TextIO,
    as_json: bool = False,
    compiles: bool = False,
    page: str | None = None,
    search: float | None = None,
) -> int:
    """Plan the recipe for the topology; the plan goes to `output`. `compiles`: have the TPU's compiler judge
    it. `page`: a file for the HTML page. `search`: have the compiler judge further candidates for so many
    seconds, and take the best by its figures.
    """
    compiles |= search is not None
    found = Topology.parse(topology)
    cfg = read_recipe(find_recipe(recipe), overrides)
    missing = why_not(found) if compiles else None
    if compiles and missing is None:
        start_slice(found)  # before anything uses the device
    made = make_plan(task_of(cfg, found))
    judged: list[Judged] = []
    best: Judged | None = None
    change: str | None = None
    if compiles and missing is None and made.chosen is not None:
        judge = judge_by(partial(subject_of, cfg), made.task)
        judged = [judge(made.chosen)] if search is None else searched(made, judge, search)
        best = winner(made, judged)
        missing, change = best.problem, change_that_fits(made, judge, best)
        if best.is_too_large and (largest := largest_of_a_layer(subject_of(cfg, best.candidate))) is not None:
            missing = f"{missing}; {largest}"
    step = None if best is None else best.step
    of_best = made if best is None else replace(made, chosen=best.candidate)
    if page is not None and made.chosen is not None:
        write_page(Path(page), plan_page(of_best, step), "the plan")
    if as_json:
        plain = made.as_json()
        plain["changes"] += advice(made)
        if compiles:
            plain["compiled"] = {"missing": missing} if step is None else step.as_json()
            plain["compiled"]["change"] = change
        if search is not None:
            plain["search"] = [each.as_json() | {"wins": each is best} for each in judged]
        print(json.dumps(plain, indent=1), file=output, flush=True)
        return 0 if made.chosen is not None else 2
    refuse(made)
    found_lines = list(lines(made))
    if search is not None and best is not None:
        found_lines += search_lines(made, judged, best)
    if compiles:
        found_lines += compiled_lines(of_best, step) if step is not None else [f"not compiled: {missing}"]
    if change is not None:
        found_lines.append(f"change  {change}")
    print("\n".join(found_lines), file=output, flush=True)
    return 0


def subject_of(cfg: RecipeConfig, candidate: Candidate) -> Subject:
    """A candidate as the Trainer would run it."""
    layout, degrees = candidate.layout, candidate.layout.degrees
    parallel = replace(cfg.parallel, auto=False, **degrees)  # type: ignore[arg-type]  # they are numbers
    run = replace(
        cfg,
        run_dir=None,
        parallel=parallel,
        trainer=replace(cfg.trainer, accumulate=candidate.micro_batches),
    )
    model_cfg = cfg.model.recomputing(candidate.rung)
    return Subject(
        lambda: _without_values(cfg, model_cfg),
        run,
        _host_batch(cfg, candidate.rows * layout.data_ranks),
        layout,
    )


def task_of(cfg: RecipeConfig, topology: Topology, settings: str = "") -> Task:
    """What a recipe asks of a topology. `settings`: what is tried with it, for people."""
    tried = f" with {settings}" if settings else ""
    with announced(f"running {cfg.model.name}{tried} without values"):
        workload = _workload(cfg)
    samples = cfg.batch.samples
    rows = cfg.batch.size * cfg.trainer.accumulate
    asked = cfg.model.recomputes
    has_host = topology.chip.name != "cpu" and cfg.execution.train in ("fused", "captured")
    choice = tuple(each for each in RUNGS if has_host or each != OFFLOAD)
    return Task(
        workload,
        topology,
        rows,
        micro_rows=samples,
        precision=Precision.of(cfg.optim, cfg.execution.autocast),
        rungs=choice if asked is None else (asked,),
        built_rungs=RUNGS if cfg.model.can_recompute else ("none",),
        variants=RecipeVariants(cfg, lambda changed, settings: task_of(changed, topology, settings)),
    )


def _workload(cfg: RecipeConfig) -> Workload:
    cfg.check_limits(*cfg.model.limits_there())
    model_cfg = cfg.model.recomputing("none")
    with torch.device("meta"):
        model = model_cfg.build(cfg.seed) if cfg.model.is_built_whole(False) else model_cfg.build_empty()
        if cfg.lora.rank > 0:
            add_lora(model, cfg.lora, cfg.seed)
    freeze(model, cfg.optim.freeze)
    return workload_of(
        model,
        cfg.data.example,
        name=cfg.model.described,
        autocast=cfg.execution.autocast,
        plan=cfg.parallel.plan,
        has_masters=cfg.optim.master_weights,
    )


def _without_values(cfg: RecipeConfig, model_cfg: ModelConfig) -> nn.Module:
    """The model as the Trainer is given it, with parameters on meta."""
    with parameters_on_meta():
        model = model_cfg.build_empty(cfg.seed)
        if cfg.lora.rank > 0:
            add_lora(model, cfg.lora, cfg.seed)
    freeze(model, cfg.optim.freeze)
    return model


def _host_batch(cfg: RecipeConfig, rows: int) -> dict[str, Tensor]:
    """A batch as the recipe's data gives it, in memory for one row."""
    return {
        name: torch.zeros(1, *each.shape[1:], dtype=each.dtype).expand(rows, *each.shape[1:])
        for name, each in cfg.data.example(rows).items()
    }
