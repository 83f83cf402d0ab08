"""A recipe with other settings, as a plan wants to try them."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from tputrain.errors import UserError
from tputrain.models.config import LlamaModelConfig, VitModelConfig
from tputrain.parallel.candidate import Task
from tputrain.parallel.limits import undividing_phases
from tputrain.parallel.variants import Settings, Variant, Variants, overrides
from tputrain.recipe import RecipeConfig


class RecipeVariants(Variants):
    """Of `cfg`. A model is run without values once for each group of settings that is asked for."""

    def __init__(self, cfg: RecipeConfig, task_of: Callable[[RecipeConfig, str], Task]):
        self._cfg, self._task_of = cfg, task_of
        self._tasks: dict[str, Task | None] = {}
        self.undividing_phases = undividing_phases(cfg.execution)
        model = cfg.model
        self.has_fixed_sizes = model.is_trained and not model.runs_code
        self.sizes = {}
        if isinstance(model, LlamaModelConfig | VitModelConfig) and not self.has_fixed_sizes:
            shape = asdict(model.resolve())
            self.sizes = {f"model.{key}": shape[key] for key in asdict(model) if type(shape.get(key)) is int}

    def value(self, key: str) -> Any:
        group, _, name = key.partition(".")
        return getattr(getattr(self._cfg, group), name)

    def of(self, task: Task, settings: Settings) -> Variant | None:
        said = overrides(settings)
        if said not in self._tasks:
            self._tasks[said] = self._changed(task, settings, said)
        found = self._tasks[said]
        if found is None:
            return None
        has_other_steps = any(key.startswith("execution.") for key in settings)
        return Variant(
            said,
            replace(
                task,
                workload=found.workload,
                precision=found.precision,
                rows=found.rows,
                micro_rows=found.micro_rows,
                rungs=found.rungs if has_other_steps else task.rungs,
                divides_layers=found.divides_layers,
                variants=found.variants,
            ),
        )

    def _changed(self, task: Task, settings: Settings, said: str) -> Task | None:
        try:
            cfg = self._with(settings)
            if all(key.startswith("batch.") for key in settings):  # the model is the same
                rows = cfg.batch.size * cfg.trainer.accumulate
                variants = RecipeVariants(cfg, self._task_of)
                return replace(task, rows=rows, micro_rows=cfg.batch.samples, variants=variants)
            return self._task_of(cfg, said)
        except UserError:
            return None

    def _with(self, settings: Settings) -> RecipeConfig:
        groups: dict[str, dict[str, Any]] = {}
        for key, value in settings.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        changed = {group: replace(getattr(self._cfg, group), **values) for group, values in groups.items()}
        # Micro-batches follow from the batch, as in a recipe that is read.
        batch, data = changed.get("batch", self._cfg.batch), changed.get("data", self._cfg.data)
        trainer = replace(self._cfg.trainer, accumulate=batch.micro_batches(data.sequence_length))
        return replace(self._cfg, trainer=trainer, **changed)
