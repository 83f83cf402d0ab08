"""Evaluations: means over the batches of every evaluation set, with the weights that are to be evaluated."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.announce import announced, say
from tputrain.batches import Batch, labelled, part_with_labels
from tputrain.errors import UserError
from tputrain.feed import generators_of
from tputrain.loggers.logger import Record
from tputrain.loop.logged import means as means_of
from tputrain.metrics.evaluation import WeightedMeans, evaluated, evaluation_sets, merged, metric_value
from tputrain.metrics.named import PERPLEXITY
from tputrain.models.sequence import sequence_split
from tputrain.out_of_range import out_of_range_in
from tputrain.parallel.agreement import Agreement
from tputrain.parallel.same_batches import given_alike
from tputrain.signals import SignalWatch
from tputrain.watchdog import EVALUATING, Watchdog

if TYPE_CHECKING:
    from tputrain.trainer import Trainer


_SECONDS_BETWEEN_NEWS = 15.0


def _of(loader: Any, most: int | None) -> str:
    """`of 300 `, where it is known how many batches an evaluation has."""
    try:
        num_batches = len(loader) if most is None else min(len(loader), most)
    except TypeError:  # only gone through can it be counted
        return "" if most is None else f"of at most {most:,} "
    return f"of {num_batches:,} "


def _better(best: Record | None, result: Record) -> Record | None:
    """The better one by its loss; one that is not finite is never the best."""
    if math.isfinite(result["loss"]) and (best is None or result["loss"] < best["loss"]):
        return {"step": result["step"], "loss": result["loss"]}
    return best


class Evaluator:
    """Measures a Trainer's model on its `val_loader`. It changes no weights, no buffers, no position, and no
    random number that training draws.
    """

    def __init__(self, trainer: "Trainer", signals: SignalWatch, agreement: Agreement, watchdog: Watchdog):
        self.trainer, self._signals, self._watchdog = trainer, signals, watchdog
        self._agreement = agreement

    def evaluate(self) -> Record | None:
        """Measure, for the run: the Trainer knows the result; None where a signal came in between."""
        trainer, result = self.trainer, self.measure()
        if result is None:
            return None
        trainer.execution.has_run("validate")
        trainer.evaluated_at = trainer.step
        record = {"step": trainer.step, "loss_hex": result["loss"].hex(), **result}
        trainer.best = _better(trainer.best, record)
        return record

    def measure(self) -> dict[str, float] | None:
        """The results of all evaluation sets as one; None where a signal came in between."""
        started, results = time.perf_counter(), {}
        for name, loader in evaluation_sets(self.trainer.val_loader).items():
            what = f"evaluating {name}{' ' * bool(name)}at step {self.trainer.step}"
            kept = rng.kept(self.trainer.device, generators_of(loader))
            evaluating = self._evaluating(with_logits=bool(self.trainer.metrics))
            with kept, self._watchdog.phase(EVALUATING), evaluating, announced(what), out_of_range_in(what):
                result = self._measure_set(loader)
            if result is None:
                return None
            results[name] = result
        return merged(results) | {"seconds": time.perf_counter() - started}

    def _measure_set(self, loader: Iterable[Batch]) -> dict[str, float] | None:
        """Means over the batches of one set; None where a signal came in between."""
        means, cfg = WeightedMeans(getattr(loader, "bytes_of", None)), self.trainer.cfg.trainer
        said_at = time.monotonic()
        most = islice(self._signals.until_received(loader), cfg.evaluate_batches)
        for done, batch in enumerate(given_alike(self.trainer.world, "val_loader", most)):
            self._watchdog.go_on()
            if time.monotonic() - said_at > _SECONDS_BETWEEN_NEWS:
                said_at = time.monotonic()
                say(f"evaluating: {done:,} {_of(loader, cfg.evaluate_batches)}batches done")
            self._add(means, batch)
            self._agreement.reach()
        if self._signals.received is not None:
            return None
        return means.result(PERPLEXITY in cfg.metrics, self.trainer.world.total)

    def _add(self, means: WeightedMeans, batch: Batch) -> None:
        """Count a batch, of which each rank runs its samples."""
        world, weigh = self.trainer.world, self.trainer.label_weights.of_one
        means.count(batch)
        for slices in world.rounds(batch):
            weights = [0 if each is None else weigh(each) for each in slices]
            if sum(weights) == 0:
                continue
            own = weights[world.data_rank]
            # All ranks make equal calls: one with nothing to count runs what another counts.
            taken = part_with_labels(weights, world.data_rank, world.context_size)
            part = slices[taken] if weights[taken] else labelled(slices[taken])
            with sequence_split(world.sequence), self.trainer.train_step.logged.collected() as logged:
                loss, output, target = self.trainer.train_step.forward(part)
            values = {
                name: metric_value(name, metric(output, target), self.trainer.device)
                for name, metric in self.trainer.metrics.items()
            }
            means.add({"loss": loss} | values | self._tensors(logged, values), own, sum(weights))
            devices.flush(self.trainer.device)

    def _tensors(self, logged: dict[str, Any], metrics: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model or its loss gave to `trainer.log`, for the means over the evaluation."""
        for name in logged:
            if name in metrics:
                raise UserError(f"trainer.log({name!r}, ...): expected another name than that of a metric")
        device = self.trainer.device
        return {name: torch.as_tensor(value, device=device) for name, value in means_of(logged).items()}

    def predict(self, loader: Iterable[Batch]) -> list[Any]:
        """The model's outputs, on the host."""
        model, outputs = self.trainer.execution, []
        kept = rng.kept(self.trainer.device, generators_of(loader))
        with kept, self._evaluating(with_logits=True), self.trainer.train_step.aside():
            for batch in loader:
                on_device = batch_of.to_device(batch, self.trainer.device)
                with devices.autocast(self.trainer.device, model.autocast):
                    inputs, named_inputs = batch_of.arguments(self.trainer.model, on_device)
                    output = model.model(*inputs, **named_inputs)
                outputs.append(tree_map_only(Tensor, lambda each: each.cpu(), output))
        return outputs

    @contextmanager
    def _evaluating(self, with_logits: bool) -> Iterator[None]:
        trainer = self.trainer
        with evaluated(trainer.model, with_logits), trainer.execution.phase("validate"):
            with torch.no_grad(), trainer.evaluation_weights.in_place():
                yield
