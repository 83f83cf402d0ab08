"""The state of every random number generator a run draws from, as JSON."""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tputrain import device as devices


def capture(device: torch.device) -> dict[str, Any]:
    """States of torch's cpu generator, the device's, NumPy's global one and Python's."""
    on_device = devices.rng_state(device)
    on_cpu, (name, keys, *rest), (version, words, gauss) = snapshot()
    return {
        "torch": to_hex(on_cpu),
        "device": None if on_device is None else to_hex(on_device),
        "numpy": [name, np.asarray(keys).tolist(), *rest],
        "python": [version, list(words), gauss],
    }


def restore(device: torch.device, state: dict[str, Any]) -> None:
    """Put every generator back to what `capture` saw.

    A state without the device's generator (the run was on the cpu) leaves that generator as it is.
    """
    if state["device"] is not None and device.type == "tpu":
        devices.set_rng_state(device, from_hex(state["device"]))
    name, keys, *rest = state["numpy"]
    version, words, gauss = state["python"]
    of_numpy = (name, np.array(keys, dtype=np.uint32), *rest)
    put_back((from_hex(state["torch"]), of_numpy, (version, tuple(words), gauss)))


def seed_rank(device: torch.device, seed: int, rank: int) -> None:
    """Have ranks draw different numbers on their devices. The first one's are those of a run of one process.

    The host's generators stay as they are: loaders draw from them, and all ranks draw the same batch.
    """
    if rank > 0 and device.type == "tpu":
        derived = int(np.random.Philox(key=np.array([seed, rank], dtype=np.uint64)).random_raw()) >> 1
        devices.seed_device(device, derived)


def snapshot() -> tuple[Any, ...]:
    """States of the host's generators as they are: quick enough for every step, unlike `capture`."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def put_back(states: tuple[Any, ...]) -> None:
    """Put the host's generators back to what `snapshot` saw."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


@contextmanager
def kept(device: torch.device, others: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """What is drawn in here counts for nothing: afterwards every generator, and `others`, are as before."""
    host, on_device = snapshot(), devices.rng_state(device)
    states = [(each, each.get_state()) for each in others]
    try:
        yield
    finally:
        put_back(host)
        if on_device is not None:
            devices.set_rng_state(device, on_device)
        for generator, state in states:
            generator.set_state(state)


def to_hex(state: torch.Tensor) -> str:
    """A generator's state (uint8) as text."""
    return state.cpu().numpy().tobytes().hex()


def from_hex(text: str) -> torch.Tensor:
    """What `to_hex` had."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
