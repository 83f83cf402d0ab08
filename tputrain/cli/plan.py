"""`tputrain plan`: whether a recipe fits a slice, how it is laid out there, and how fast a step is."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from tputrain.announce import announced
from tputrain.cli.result import print_result
from tputrain.errors import UserError
from tputrain.models import ModelConfig, add_lora, parameters_on_meta
from tputrain.models.recompute import OFFLOAD
from tputrain.optim.groups import freeze
from tputrain.parallel.candidate import Candidate, Task
from tputrain.parallel.config import DEGREES, ParallelConfig
from tputrain.parallel.dry_run import workload_of
from tputrain.parallel.limits import check_forms, check_takes_parts, undividing_phases
from tputrain.parallel.memory_model import RUNGS, Precision
from tputrain.parallel.plan import Plan, make_plan, refuse
from tputrain.parallel.plan_report import lines
from tputrain.parallel.slices import check_length
from tputrain.parallel.tensor_plan import matched_rules
from tputrain.parallel.topology import Topology
from tputrain.parallel.workload import Workload, for_lengths
from tputrain.planning.compiled_report import compiled_as_json, compiled_lines
from tputrain.planning.compiled_step import CompiledStep, Subject, largest_of_a_layer, start_slice, why_not
from tputrain.planning.judged import (
    Judged,
    change_that_fits,
    judge_by,
    search_lines,
    searched,
    winner,
)
from tputrain.planning.recipe_variants import RecipeVariants
from tputrain.recipe import RecipeConfig, read_recipe
from tputrain.report.document import write_page
from tputrain.report.plan_page import plan_page
from tputrain.shipped import find_recipe
from tputrain.signals import Terminated


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

    Raises KeyboardInterrupt, Terminated or UserError where one comes while the compiler works. What was
    compiled until then is printed before.
    """
    compiles |= search is not None
    found = Topology.parse(topology)
    cfg = read_recipe(find_recipe(recipe), overrides)
    missing = why_not(found) if compiles else None
    if compiles and missing is None:
        start_slice(found)  # before anything uses the device
    made = make_plan(task_of(cfg, found))
    changes = made.changes  # before the compiler works: an interrupt leaves three seconds to print
    compiled = _Compilation(missing=missing)
    if compiles and missing is None and made.chosen is not None:
        compiled = _compile(cfg, made, search)
    of_best = made if compiled.best is None else replace(made, chosen=compiled.best.candidate)
    try:
        if as_json:
            in_words = json.dumps(_as_json(made, of_best, compiled, compiles, search is not None), indent=1)
        else:
            refuse(made)
            in_words = "\n".join(_as_lines(made, of_best, compiled, compiles, search is not None))
        print_result(in_words, output)
    finally:  # also where nobody reads the output
        if page is not None and made.chosen is not None:
            write_page(Path(page), plan_page(of_best, compiled.step, changes), "the plan")
    if compiled.end is not None:
        raise compiled.end
    return 0 if made.chosen is not None else 2


@dataclass
class _Compilation:
    """What became of compiling the plan, or candidates of a search."""

    judged: list[Judged] = field(default_factory=list)
    best: Judged | None = None
    missing: str | None = None
    """Why there is no compiled step."""
    change: str | None = None
    """A smaller plan, where the best one is too large."""
    end: BaseException | None = None
    """An interrupt or an error that came while the compiler worked."""

    @property
    def step(self) -> CompiledStep | None:
        return None if self.best is None else self.best.step

    def search_end(self) -> str | None:
        """How a search was interrupted."""
        if not isinstance(self.end, KeyboardInterrupt | Terminated):
            return None
        return f"interrupted after {len(self.judged)} candidates"


def _compile(cfg: RecipeConfig, made: Plan, search: float | None) -> _Compilation:
    """Of the plan, or of as many candidates as are compiled in `search` seconds, or until an interrupt."""
    assert made.chosen is not None
    compiled = _Compilation(missing="interrupted before the compiler's first result")
    judge = judge_by(partial(subject_of, cfg), made.task)
    try:
        for each in [judge(made.chosen)] if search is None else searched(made, judge, search):
            compiled.judged.append(each)
            compiled.best = winner(made, compiled.judged)
            compiled.missing = compiled.best.problem
        assert compiled.best is not None
        compiled.change = change_that_fits(made, judge, compiled.best)
        if compiled.best.is_too_large:
            largest = largest_of_a_layer(subject_of(cfg, compiled.best.candidate))
            compiled.missing = compiled.missing if largest is None else f"{compiled.missing}; {largest}"
    except (KeyboardInterrupt, Terminated) as error:
        compiled.end = error
    except UserError as error:
        compiled.end = error
        if not compiled.judged:
            compiled.missing = "the step is refused"
    return compiled


def _as_json(
    made: Plan, of_best: Plan, compiled: _Compilation, compiles: bool, searches: bool
) -> dict[str, Any]:
    found = made.as_json()
    if compiles:
        step = compiled.step
        found["compiled"] = {"missing": compiled.missing} if step is None else compiled_as_json(of_best, step)
        found["compiled"]["change"] = compiled.change
    if searches:
        found["search"] = [
            each.as_json(made.task) | {"wins": each is compiled.best} for each in compiled.judged
        ]
        found["interrupted"] = compiled.search_end()
    return found


def _as_lines(
    made: Plan, of_best: Plan, compiled: _Compilation, compiles: bool, searches: bool
) -> Iterator[str]:
    yield from lines(made)
    if searches and compiled.best is not None:
        yield from search_lines(made, compiled.judged, compiled.best)
        if (end := compiled.search_end()) is not None:
            yield f"search  {end}"
    if compiles and compiled.step is not None:
        yield from compiled_lines(of_best, compiled.step)
    elif compiles:
        yield f"not compiled: {compiled.missing}"
    if compiled.change is not None:
        yield f"change  {compiled.change}"


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
    degrees = _given_degrees(cfg.parallel, topology)
    context, tensor = (1, 1) if degrees is None else (degrees["context"], degrees["tensor"])
    check_forms(cfg.execution, topology.num_devices, context * tensor > 1)
    for length in cfg.data.lengths:
        check_length(length, context)
    of_run = [each for each in settings.split() if not each.startswith("model.")]  # the others are named
    tried = f" with {' '.join(of_run)}" if of_run else ""
    with announced(f"running {cfg.model.described}{tried} on shapes alone"):
        workload = _workload(cfg, context, tensor)
    samples = cfg.batch.samples
    rows = cfg.batch.size * cfg.trainer.accumulate
    asked = cfg.model.recomputes
    has_host = not topology.chip.is_stand_in and cfg.execution.train in ("fused", "captured")
    choice = tuple(each for each in RUNGS if has_host or each != OFFLOAD)
    return Task(
        workload,
        topology,
        rows,
        micro_rows=samples,
        precision=Precision.of(cfg.optim, cfg.execution.autocast),
        rungs=choice if asked is None else (asked,),
        built_rungs=RUNGS if cfg.model.can_recompute else ("none",),
        degrees=degrees,
        divides_layers=not undividing_phases(cfg.execution),
        variants=RecipeVariants(cfg, lambda changed, settings: task_of(changed, topology, settings)),
    )


def _given_degrees(parallel: ParallelConfig, topology: Topology) -> dict[str, int] | None:
    """Those of the recipe, -1 worked out; None where it sets none."""
    given = {name: getattr(parallel, name) for name in DEGREES if getattr(parallel, name) != 1}
    if not given:
        return None
    try:
        return parallel.resolved(topology.num_devices)
    except UserError:
        asked = " ".join(f"parallel.{name}={degree}" for name, degree in given.items())
        rest, left_over = divmod(topology.num_devices, math.prod(given.values()))
        free = next((name for name in ("shard", "replicate") if name not in given), None)
        fits = free is not None and rest > 0 and left_over == 0
        beside = f" (with parallel.{free}={rest} they do)" if fits else ""
        raise UserError(
            f"{asked}: expected degrees that multiply to the {topology.num_devices} devices of "
            f"{topology.name}{beside}, or none of them: then the plan chooses"
        ) from None


def _workload(cfg: RecipeConfig, context: int, tensor: int) -> Workload:
    """Raises UserError where the model does not divide by these degrees."""
    cfg.check_limits(*cfg.model.limits_there())
    model_cfg = cfg.model.recomputing("none")
    with torch.device("meta"):
        model = model_cfg.build_empty(cfg.seed)  # no weights are read
        if cfg.lora.rank > 0:
            add_lora(model, cfg.lora, cfg.seed)
    freeze(model, cfg.optim.freeze)
    check_takes_parts(context, model)
    if tensor > 1:
        matched_rules(model, cfg.parallel.plan, tensor)  # raises, with the layer that does not divide
    found = workload_of(
        model,
        cfg.data.example,
        name=cfg.model.described,
        autocast=cfg.execution.autocast,
        plan=cfg.parallel.plan,
        has_masters=cfg.optim.master_weights,
    )
    if tensor not in found.tensor_degrees:
        known = ", ".join(map(str, found.tensor_degrees))
        raise UserError(f"parallel.tensor={tensor}: {found.name}: expected one of {known}")
    return for_lengths(found, cfg.data.lengths)


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
