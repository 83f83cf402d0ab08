"""parallel.auto: a plan for the chips that the ranks have chooses the degrees, and which rank is where."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tputrain import batches as batch_of
from tputrain import device as devices
from tputrain import rng
from tputrain.announce import say
from tputrain.batches import Batch
from tputrain.errors import UserError
from tputrain.feed import feed_of
from tputrain.loss import LossFunction
from tputrain.models.recompute import LAYERS, NONE, SETTINGS, pattern
from tputrain.parallel.candidate import Task
from tputrain.parallel.config import DEGREES
from tputrain.parallel.dry_run import batch_like, workload_of
from tputrain.parallel.layout import mesh_of
from tputrain.parallel.limits import undividing_phases
from tputrain.parallel.memory_model import Precision
from tputrain.parallel.plan import make_plan, refuse
from tputrain.parallel.plan_report import lines
from tputrain.parallel.topology import CHIPS, Topology
from tputrain.parallel.workload import for_lengths
from tputrain.parallel.world import Ranks, World

if TYPE_CHECKING:
    from tputrain.config import RunConfig

_OFF = {"recomputes": NONE, "gradient_checkpointing": False}
"""Attributes of modules that do activation checkpointing, switched off: ours, and those of transformers."""


def divided(
    world: World,
    model: nn.Module,
    cfg: "RunConfig",
    train_loader: Any,
    loss_fn: LossFunction | None,
) -> World:
    """The same ranks, divided as the plan says for a step of `model`. The first one makes it, and prints it.

    Raises UserError on all ranks where no plan fits.
    """
    if not isinstance(world, Ranks):
        return world
    device = devices.find_device(cfg.device)
    places = world.of_all(devices.place(device))
    chip = devices.chip_name(device) or ""
    degrees, order = world.first(
        lambda: _division(
            model,
            cfg,
            _first_batch(train_loader, device),
            getattr(train_loader, "lengths", ()),
            loss_fn,
            chip,
            places,
        )
    )
    return world.divided(degrees, order)


@dataclass(frozen=True)
class _Chips:
    topology: Topology
    places: list[tuple[int, ...]]
    """Of each rank its slice, and its coordinates along the topology's axes."""


def _division(
    model: nn.Module,
    cfg: "RunConfig",
    batch: Batch,
    lengths: Sequence[int],
    loss_fn: LossFunction | None,
    chip: str,
    places: Sequence[tuple[int, ...] | None],
) -> tuple[dict[str, int], list[int]]:
    """Degrees, and the ranks in the order of the mesh. `lengths`: of rows in all batches, as far as known."""
    one_group = dict.fromkeys(DEGREES, 1) | {"shard": len(places)}
    chips = chips_of(chip, places)
    if chips is None:
        say(f"parallel.auto: shard {len(places)}, as plans do not know {chip}")
        return one_group, list(range(len(places)))
    rows = batch_of.num_samples(batch)
    with _without_checkpointing(model) as rung:
        workload = workload_of(
            model,
            batch_like(batch),
            loss_fn=loss_fn,
            autocast=cfg.execution.autocast,
            plan=cfg.parallel.plan,
            has_masters=cfg.optim.master_weights,
        )
    plan = make_plan(
        Task(
            for_lengths(workload, lengths),
            chips.topology,
            rows * cfg.trainer.accumulate,
            micro_rows=rows,
            precision=Precision.of(cfg.optim, cfg.execution.autocast),
            rungs=(rung,),
            divides_layers=not undividing_phases(cfg.execution),
            degrees=one_group if chips.topology.chip.is_stand_in else None,
        )
    )
    refuse(plan)
    for line in lines(plan):
        say(line)
    assert plan.chosen is not None
    layout = plan.chosen.layout
    mesh = torch.tensor(mesh_of(layout, chips.places))
    return layout.degrees, ascending(mesh).flatten().tolist()


def chips_of(chip: str, places: Sequence[tuple[int, ...] | None]) -> _Chips | None:
    """The slices that the ranks are on; None where plans do not know such chips.

    `places`: of each rank (slice, x, y, z, core), or None on a CPU. Raises UserError unless each slice is
    whole, with one rank a device.
    """
    found = next((each for each in CHIPS.values() if chip in each.kinds), None)
    if found is None:
        return None
    if found.is_stand_in:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", len(places)))
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / here
        topology = Topology(replace(found, hbm=memory), (len(places),))
        return _Chips(topology, [(0, rank) for rank in range(len(places))])
    known = [place for place in places if place is not None]
    columns = list(zip(*known, strict=True))
    slices, starts = sorted(set(columns[0])), [min(column) for column in columns]
    shape = tuple(max(column) - min(column) + 1 for column in columns[1 : 1 + found.num_axes])
    topology = Topology(found, shape, len(slices))
    axes = [("slice", "x", "y", "z", "core").index(axis.name) for axis in topology.axes]
    placed = [(slices.index(place[0]), *(place[axis] - starts[axis] for axis in axes)) for place in known]
    if not len(places) == len(set(placed)) == topology.num_devices:
        raise UserError(
            f"parallel.auto: {len(places)} ranks on {topology.name}: expected {topology.num_devices}, one a "
            "device; or degrees, such as parallel.shard=-1"
        )
    return _Chips(topology, placed)


def ascending(mesh: Tensor) -> Tensor:
    """The mesh with the same groups of ranks along each of its axes, in which ranks ascend: PyTorch sorts the
    ranks of a group, and XLA chooses the order of a ring itself.
    """
    for dim in range(mesh.dim()):
        along = mesh.movedim(dim, 0).flatten(1)[:, 0]
        mesh = mesh.index_select(dim, along.argsort())
    if any((mesh.diff(dim=dim) < 0).any() for dim in range(mesh.dim())):
        raise UserError(
            "parallel.auto: ranks do not ascend along the axes of the slice: expected them host by host, in "
            "the order of the chips, or degrees such as parallel.shard=-1"
        )
    return mesh


def _first_batch(train_loader: Any, device: torch.device) -> Batch:
    """A micro-batch, after which the loader is where it was."""
    if train_loader is None:
        raise UserError(
            "parallel.auto: expected a train_loader, for whose batches ranks are divided; or degrees"
        )
    feed = feed_of(train_loader, device)
    if not feed.can_go_back:
        raise UserError(
            f"parallel.auto: train_loader is a {type(train_loader).__name__}, which gives each batch once: "
            "expected a DataLoader, a list, or another one that begins anew; or degrees"
        )
    with rng.kept(torch.device("cpu")):
        position = feed.state()
        batch = feed.batches(0, 1)[0]
        feed.restore(position)
    return batch


@contextmanager
def _without_checkpointing(model: nn.Module) -> Iterator[str]:
    """A plan adds it itself: yields the kind, or kinds."""
    kinds = [getattr(each, "recomputes", None) for each in model.modules()]
    known = [kind for kind in kinds if kind in SETTINGS]
    found = [(each, name, getattr(each, name, None)) for each in model.modules() for name in _OFF]
    changed = [(each, name, was) for each, name, was in found if was not in (None, False, NONE)]
    for module, name, _ in changed:
        setattr(module, name, _OFF[name])
    try:
        yield pattern(known or [LAYERS if changed else NONE])
    finally:
        for module, name, was in changed:
            setattr(module, name, was)
