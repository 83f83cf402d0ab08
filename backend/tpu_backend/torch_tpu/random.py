"""Generators of random numbers: one for each device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tpu_backend import _C
from tpu_backend.torch_tpu.devices import current_device, device_count, index_of


class _DefaultGenerators:
    """A sequence of the devices' generators. The device makes them."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: int) -> torch.Generator:
        try:
            return _C.default_generator(index_of(index))
        except RuntimeError as error:
            raise IndexError(str(error)) from None

    def __iter__(self) -> Iterator[torch.Generator]:
        return (self[index] for index in range(device_count()))


default_generators = _DefaultGenerators()


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed() -> None:
    default_generators[current_device()].seed()


def seed_all() -> None:
    manual_seed_all(default_generators[0].seed())


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: Any = "tpu") -> torch.Tensor:
    """The generator's (seed, offset) as a uint8 CPU tensor of 16 bytes."""
    return default_generators[index_of(device)].get_state()


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state(new_state: torch.Tensor, device: Any = "tpu") -> None:
    default_generators[index_of(device)].set_state(new_state)


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)
