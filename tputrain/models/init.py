"""Initial values: each depends only on (seed, the parameter's name, its place in the parameter).

The same on every device, mode, mesh, machine and NumPy version, because everything below is either NumPy's
raw Philox stream, which is promised never to change, or integer and correctly rounded float64 arithmetic:
no logarithm or cosine, whose last bit differs between CPUs. Changing any of it changes every model trained
from a given seed.
"""

from collections.abc import Iterator
from hashlib import blake2b
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import own_part

_VALUES_A_BLOCK = 2  # Philox gives four 64-bit words for each value of its counter, a normal number takes two
_CHUNK = 1 << 20  # values made at a time: bounds the memory


class Initializable(Protocol):
    """What `initialize` asks of a model."""

    def initial_std(self, name: str) -> float | None:
        """The standard deviation that parameter `name` is drawn with; None: it starts as ones."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...


@torch.no_grad()
def initialize(model: Initializable, seed: int) -> None:
    """Write every parameter's initial value, whatever its device and dtype (rounded to that last).

    Of a parameter that is divided among ranks, each makes its own part. Parameters on `meta` must have been
    given memory first (`model.to_empty(device=...)`).
    """
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device: call model.to_empty(device=...) before initialize()"
            )
        is_of_lora = name.endswith((".lora_a", ".lora_b"))
        std = std_in_lora(name, parameter) if is_of_lora else model.initial_std(name)
        write_initial_value(parameter, seed, name, std)


@torch.no_grad()
def write_initial_value(parameter: Tensor, seed: int, name: str, std: float | None) -> None:
    """`initial_value` into a parameter, in its dtype; of one that is divided, this rank's part is made."""
    own, region = own_part(parameter)
    if own.numel():
        rows = initial_value(seed, name, tuple(parameter.shape), std, region[0])
        own.copy_(rows[:, *region[1:]].to(own.dtype))


def std_in_lora(name: str, parameter: Tensor) -> float:
    """Of `lora_a` (rank, in) that of nn.Linear; `lora_b` begins as zero, and so does the product."""
    return (3 * parameter.shape[1]) ** -0.5 if name.endswith(".lora_a") else 0.0


def initial_value(
    seed: int, name: str, shape: tuple[int, ...], std: float | None, rows: slice = slice(None)
) -> Tensor:
    """float32 rows `rows` (default: all) of a parameter of shape `shape`, at the cost of those rows alone."""
    start, stop, _ = rows.indices(shape[0])
    row_size = int(np.prod(shape[1:], dtype=np.int64))
    local_shape = (stop - start, *shape[1:])
    if std is None:
        return torch.ones(local_shape)
    values = np.empty((stop - start) * row_size, dtype=np.float32)
    for first in range(0, len(values), _CHUNK):
        count = min(_CHUNK, len(values) - first)
        normal = standard_normal(seed, name, start * row_size + first, count)
        values[first : first + count] = normal * std
    return torch.from_numpy(values.reshape(local_shape))


def standard_normal(seed: int, name: str, start: int, count: int) -> np.ndarray:
    """Values `start` to `start + count` of the normal stream of (seed, name), float64, exact everywhere.

    64 fair coins give a binomial of variance 16, with steps of a quarter standard deviation; two uniforms
    that sum to a triangle over the steps make it smooth (density: the binomial's, joined by straight
    lines). Its kurtosis is 2.98 where a normal's is 3, its largest value is beyond 8 standard deviations.
    """
    key = blake2b(name.encode(), digest_size=16, key=(seed % 2**64).to_bytes(8, "little")).digest()
    skipped = start % _VALUES_A_BLOCK
    bits = np.random.Philox(key=int.from_bytes(key, "little"))
    bits.advance(start // _VALUES_A_BLOCK)
    words = bits.random_raw(2 * (skipped + count)).reshape(-1, 2)[skipped:]
    coins, dither = words[:, 0], words[:, 1]
    triangle = (dither >> np.uint64(32)).astype(np.float64) + (dither & np.uint64(2**32 - 1)).astype(
        np.float64
    )
    # (t + 1) / 2^32 is symmetric around 1: the two uniforms are the midpoints of their 2^32 cells.
    centred = np.bitwise_count(coins).astype(np.float64) - 33.0 + (triangle + 1.0) * 2.0**-32
    return centred / np.sqrt(16.0 + 1.0 / 6.0)
