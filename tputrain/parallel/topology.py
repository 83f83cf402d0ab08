"""TPU slices: how chips are connected, and what each can do. Every figure has a public source.

A slice is a grid of chips. Along each of its axes neighbours are linked, and where the ends are linked too
the axis is a ring (it wraps). Slices are connected to each other by the data center's network (DCN) alone.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations_with_replacement
from math import prod

from tputrain.config_checks import did_you_mean, nearest
from tputrain.errors import UserError

GIB = 2**30

SOURCES = {
    # Memory, peak, cores, links and network a chip; shapes and chips a host.
    "v4": "https://docs.cloud.google.com/tpu/docs/v4",
    "v5e": "https://docs.cloud.google.com/tpu/docs/v5e",
    "v5p": "https://docs.cloud.google.com/tpu/docs/v5p",
    "v6e": "https://docs.cloud.google.com/tpu/docs/v6e",
    "tpu7x": "https://docs.cloud.google.com/tpu/docs/tpu7x",
    # Bandwidth of a link in one direction, which axes wrap, PCIe, DCN a host, size of the matrix unit.
    "scaling book": "https://jax-ml.github.io/scaling-book/tpus",
    # Memory bandwidth and size of the matrix unit, where a page above does not say it.
    "jax": "https://github.com/jax-ml/jax/blob/main/jax/_src/pallas/mosaic/tpu_info.py",
}


@dataclass(frozen=True)
class Chip:
    """One generation. Figures are those of a chip; bandwidths are bytes a second."""

    name: str
    kinds: tuple[str, ...]
    """What XLA calls it."""
    pod: tuple[int, ...]
    """The largest slice."""
    hosts: tuple[tuple[int, ...], ...]
    """The chips of a host, along the axes: of a slice of one host, and of one of several."""
    cores: int
    """TensorCores. Names such as v5p-128 count them for the generations with 3 axes."""
    devices: int
    """Devices a process can have of a chip: a rank is a device."""
    hbm: float
    """Bytes that a program can use."""
    hbm_bandwidth: float
    peak_flops: float
    """bfloat16."""
    mxu: int
    """Rows and columns of a matrix unit."""
    link_bandwidth: float
    """Of one link (ICI), in one direction."""
    dcn_bandwidth: float
    """To other slices."""
    pcie_bandwidth: float
    """To the host's memory."""
    host_memory: float
    """Bytes of the host's memory."""
    clock: float
    """Cycles a second of a core, as the compiler counts them: peak FLOP/s over the FLOPs of a cycle. Of tpu7x
    it is not settled (1.9 or 2.2 GHz)."""
    core_bandwidth: float = 0.0
    """Between the two devices of a chip, in one direction."""

    @property
    def is_stand_in(self) -> bool:
        """Whether it is no TPU, but a model of processes on a CPU. None of its figures was measured."""
        return self.name == "cpu"

    @property
    def num_axes(self) -> int:
        return len(self.pod)

    @property
    def has_logits_twice(self) -> bool:
        """Whether libtpu writes the gradient of a loss's logits beside them, not over them: in its programs
        for chips of two cores (v4, v5p, tpu7x).
        """
        return self.cores > 1

    @property
    def counts_cores(self) -> bool:
        """Whether the number in a name such as v5p-128 is one of cores."""
        return self.num_axes == 3


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            kinds=("TPU v4",),
            pod=(16, 16, 16),
            hosts=((2, 2, 1), (2, 2, 1)),
            cores=2,
            devices=1,
            hbm=32 * GIB,
            hbm_bandwidth=1200e9,
            peak_flops=275e12,
            mxu=128,
            link_bandwidth=45e9,  # scaling book
            dcn_bandwidth=25e9 / 4,  # scaling book: 25 GB/s a host
            pcie_bandwidth=15e9,  # scaling book
            host_memory=400e9,
            clock=1.05e9,
        ),
        Chip(
            name="v5e",
            kinds=("TPU v5 lite", "TPU v5e"),
            pod=(16, 16),
            hosts=((2, 4), (2, 2)),
            cores=1,
            devices=1,
            hbm=16 * GIB,
            hbm_bandwidth=819e9,
            peak_flops=197e12,
            mxu=128,
            link_bandwidth=50e9,  # 400 GB/s a chip = 4 links x 2 directions x 50
            dcn_bandwidth=6.4e12 / 8 / 256,  # 6.4 Tbit/s a pod
            pcie_bandwidth=15e9,  # scaling book
            host_memory=512 * GIB,
            clock=1.5e9,
        ),
        Chip(
            name="v5p",
            kinds=("TPU v5", "TPU v5p"),
            pod=(16, 16, 24),  # of 8,960 chips in a pod, the largest job
            hosts=((2, 2, 1), (2, 2, 1)),
            cores=2,
            devices=1,
            hbm=95 * GIB,
            hbm_bandwidth=2765e9,
            peak_flops=459e12,
            mxu=128,
            link_bandwidth=100e9,  # 1,200 GB/s a chip = 6 links x 2 directions x 100
            dcn_bandwidth=50e9 / 8,  # 50 Gbit/s
            pcie_bandwidth=15e9,  # scaling book
            host_memory=448e9,
            clock=1.75e9,
        ),
        Chip(
            name="v6e",
            kinds=("TPU v6 lite", "TPU v6e"),
            pod=(16, 16),
            hosts=((2, 4), (2, 2)),
            cores=1,
            devices=1,
            hbm=32 * GIB,
            hbm_bandwidth=1638e9,
            peak_flops=918e12,
            mxu=256,
            link_bandwidth=100e9,  # 800 GB/s a chip = 4 links x 2 directions x 100
            dcn_bandwidth=100e9 / 8,  # 100 Gbit/s, by the comparison in tpu7x's page
            pcie_bandwidth=32e9,  # scaling book
            host_memory=1536 * GIB,
            clock=1.75e9,
        ),
        Chip(
            name="tpu7x",
            kinds=("TPU7x",),
            pod=(16, 24, 24),  # 9,216 chips
            hosts=((2, 2, 1), (2, 2, 1)),
            cores=2,
            devices=2,
            hbm=192 * GIB,
            hbm_bandwidth=7380e9,
            peak_flops=2307e12,
            mxu=256,  # jax
            link_bandwidth=100e9,  # 1,200 GB/s a chip = 6 links x 2 directions x 100
            dcn_bandwidth=100e9 / 8,  # 100 Gbit/s
            pcie_bandwidth=32e9,  # not published; v6e's
            host_memory=960e9,
            clock=2.2e9,
            core_bandwidth=600e9,  # its page: six times one link
        ),
        Chip(  # a model of one: processes of one machine, which meet in its memory
            name="cpu",
            kinds=("cpu",),
            pod=(64,),
            hosts=((64,), (64,)),
            cores=1,
            devices=1,
            hbm=8 * GIB,
            hbm_bandwidth=10e9,
            peak_flops=100e9,
            mxu=1,
            link_bandwidth=2e9,
            dcn_bandwidth=1e9,
            pcie_bandwidth=10e9,
            host_memory=64 * GIB,
            clock=1e9,
        ),
    )
}
_ALSO_CALLED = {"v5litepod": "v5e", "v5lite": "v5e", "v6lite": "v6e", "trillium": "v6e", "ironwood": "tpu7x"}
_NAME = re.compile(r"(?:(?P<slices>\d+)x)?(?P<chip>[a-z]+\w*?)(?::(?P<shape>[\dx]+)|-(?P<count>\d+))")
_CHIP_NAMES = "|".join(sorted([*CHIPS, *_ALSO_CALLED], key=len, reverse=True))
_MALFORMED = re.compile(rf"(?:(?P<slices>\d+)x)?(?P<chip>{_CHIP_NAMES})[\W_]*(?P<size>\d+(?:x\d+)*)")
_EXAMPLES = "a slice such as v6e:16x16, v5p-128 (128 cores) or 2x v5e:16x16"


@dataclass(frozen=True)
class Axis:
    """One direction of a slice, in which devices are linked."""

    name: str
    size: int
    wraps: bool
    bandwidth: float
    """Bytes a second that a device can send to one neighbour while all others of the slice do the same."""


@dataclass(frozen=True)
class Topology:
    """One or several equal slices."""

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """As users write it. Raises UserError, with the nearest name there is, for what does not exist."""
        match = _NAME.fullmatch(re.sub(r"\s*([:x])\s*", r"\1", text.strip().lower()))
        if match is None:
            if (meant := _well_formed(text)) is None:
                raise UserError(f"topology {text!r}: expected {_EXAMPLES}")
            cls.parse(meant)  # raises where there is no such slice
            raise UserError(f"topology {text!r}: did you mean {meant}?")
        slices = int(match["slices"] or 1)
        if slices < 1:
            raise UserError(f"topology {text!r}: expected at least one slice")
        chip = _chip(match["chip"], text)
        if match["shape"] is None:
            return cls(chip, _shape_of_count(chip, int(match["count"]), text), slices)
        sizes = match["shape"].split("x")
        if not all(size.isdigit() and int(size) for size in sizes):
            raise UserError(f"topology {text!r}: expected {_EXAMPLES}")
        return cls(chip, _known_shape(chip, tuple(map(int, sizes)), text), slices)

    @property
    def name(self) -> str:
        prefix = f"{self.slices}x " if self.slices > 1 else ""
        return f"{prefix}{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def num_chips(self) -> int:
        return self.slices * prod(self.shape)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices

    @property
    def devices_per_slice(self) -> int:
        return self.num_devices // self.slices

    @property
    def chips_per_host(self) -> int:
        one, several = (prod(each) for each in self.chip.hosts)
        in_slice = prod(self.shape)
        return min(in_slice, one) if in_slice <= one else several

    @property
    def num_hosts(self) -> int:
        return self.slices * -(-prod(self.shape) // self.chips_per_host)

    @cached_property
    def axes(self) -> tuple[Axis, ...]:
        """The directions of a slice, outermost first; the two devices of a chip, if any, come last."""
        chip = self.chip
        wraps = self._wraps()
        # What both devices of a chip send goes over the same links.
        bandwidth = chip.link_bandwidth / chip.devices
        axes = [
            Axis(name, size, wrapped and size > 2, bandwidth)
            for name, size, wrapped in zip("xyz", self.shape, wraps, strict=False)
        ]
        if chip.devices > 1:
            axes.append(Axis("core", chip.devices, False, chip.core_bandwidth))
        return tuple(axes)

    def _wraps(self) -> list[bool]:
        if self.chip.num_axes == 1:
            return [True]
        if self.chip.num_axes == 2:  # v5e, v6e: only a whole side of the pod
            return [size == whole for size, whole in zip(self.shape, self.chip.pod, strict=True)]
        return [all(size % 4 == 0 for size in self.shape)] * 3  # slices of whole cubes of 4x4x4

    # Of one device.

    @property
    def hbm(self) -> float:
        return self.chip.hbm / self.chip.devices

    @property
    def hbm_bandwidth(self) -> float:
        return self.chip.hbm_bandwidth / self.chip.devices

    @property
    def peak_flops(self) -> float:
        return self.chip.peak_flops / self.chip.devices

    @property
    def dcn_bandwidth(self) -> float:
        return self.chip.dcn_bandwidth / self.chip.devices

    @property
    def pcie_bandwidth(self) -> float:
        return self.chip.pcie_bandwidth / self.chip.devices

    @property
    def host_memory(self) -> float:
        return self.chip.host_memory / self.chips_per_host / self.chip.devices


@cache
def shapes(chip: Chip) -> tuple[tuple[int, ...], ...]:
    """The slices that one can have of a generation, the smallest first."""
    if chip.num_axes == 1:
        return tuple((size,) for size in range(1, chip.pod[0] + 1))
    if chip.num_axes == 2:
        return ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
    small = [(1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)]
    cubes = [
        shape
        for shape in combinations_with_replacement(range(4, max(chip.pod) + 1, 4), 3)
        if all(size <= most for size, most in zip(shape, chip.pod, strict=True))
    ]
    return (*small, *sorted(cubes, key=lambda shape: (prod(shape), shape)))


def _well_formed(text: str) -> str | None:
    """A name with the right signs between its parts, from one with others ("v5p128", "v6e-16x16")."""
    match = _MALFORMED.fullmatch(re.sub(r"\s*[x*×]\s*", "x", text.strip().lower()))
    if match is None:
        return None
    between = ":" if "x" in match["size"] else "-"
    slices = f"{match['slices']}x " if match["slices"] else ""
    return f"{slices}{match['chip']}{between}{match['size']}"


def _chip(name: str, text: str) -> Chip:
    found = CHIPS.get(_ALSO_CALLED.get(name, name))
    if found is None:
        hint = did_you_mean(nearest(name, [*CHIPS, *_ALSO_CALLED]))
        known = ", ".join(name for name, chip in CHIPS.items() if not chip.is_stand_in)
        raise UserError(f"topology {text!r}: no TPU is called {name} (known: {known}){hint}")
    return found


def _known_shape(chip: Chip, shape: tuple[int, ...], text: str) -> tuple[int, ...]:
    """The shape in the documented order of its axes."""
    by_sizes = {tuple(sorted(each)): each for each in shapes(chip)}
    found = by_sizes.get(tuple(sorted(shape)))
    if found is None:
        padded = (*shape, *[1] * (chip.num_axes - len(shape)))
        raise UserError(
            f"topology {text!r}: {chip.name} has no slice of that shape; nearest: {_nearest(chip, padded)}"
        )
    return found


def _shape_of_count(chip: Chip, count: int, text: str) -> tuple[int, ...]:
    """The shape nearest to a cube of a name that gives a number of chips, or of cores."""
    unit = chip.cores if chip.counts_cores else 1
    fitting = [shape for shape in shapes(chip) if prod(shape) * unit == count]
    if fitting:
        return min(fitting, key=lambda shape: max(shape) / min(shape))
    counted = "cores" if chip.counts_cores else "chips"
    sizes = sorted({prod(shape) * unit for shape in shapes(chip)}, key=lambda each: (abs(each - count), each))
    low, high = sorted(sizes[:2])
    raise UserError(
        f"topology {text!r}: {chip.name} has no slice of {count} {counted}; "
        f"nearest: {chip.name}-{low} and {chip.name}-{high}"
    )


def _nearest(chip: Chip, shape: Sequence[int]) -> str:
    def distance(known: tuple[int, ...]) -> tuple[float, ...]:
        differs = sum(abs(a - b) for a, b in zip(sorted(known), sorted(shape), strict=False))
        return abs(prod(known) - prod(shape)), differs

    ranked = sorted(shapes(chip), key=distance)[:2]
    return " and ".join(f"{chip.name}:{'x'.join(map(str, each))}" for each in ranked)
