"""How a run is laid out over many devices."""

from dataclasses import dataclass
from math import prod

from tputrain.config_checks import expect, expect_at_least, spelled

DEGREES = ("replicate", "shard", "tensor", "context")


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees, whose product is the number of processes; one of them may be -1, which is the rest."""

    replicate: int = 1
    """Copies of the model, each of which takes a part of the batch."""
    shard: int = 1
    """Parts of weights, gradients and optimizer state (FSDP); each rank takes a part of the batch."""
    tensor: int = 1
    """Parts that a layer's matrices are cut into. Only 1 so far."""
    context: int = 1
    """Parts that a sequence is cut into. Only 1 so far."""
    processes: int = 1
    """Processes that `tputrain run` starts on this machine, one a device. A launcher's own number wins."""
    restarts: int = 3
    """How often `tputrain run` starts them again after one has failed. A launcher's own number wins."""

    def __post_init__(self) -> None:
        for key in DEGREES:
            degree = getattr(self, key)
            expect(degree == -1 or degree >= 1, f"parallel.{key}", degree, "1 or more, or -1 for the rest")
        rest = [key for key in DEGREES if getattr(self, key) == -1]
        if len(rest) > 1:
            expect(False, f"parallel.{rest[1]}", -1, f"a number: parallel.{rest[0]} is the rest already")
        expect_at_least("parallel.processes", self.processes, 1)
        expect_at_least("parallel.restarts", self.restarts, 0)
        expect(
            self.tensor == 1,
            "parallel.tensor",
            self.tensor,
            "1: no model has a plan for cutting its layers yet; parallel.shard cuts the weights of any",
        )
        expect(self.context == 1, "parallel.context", self.context, "1: sequences are not cut yet")
        if self.processes > 1:
            self.resolved(self.processes)

    def data_ranks(self, world_size: int) -> int:
        """Ranks that share a batch: each takes a part of it."""
        degrees = self.resolved(world_size)
        return degrees["replicate"] * degrees["shard"]

    def resolved(self, world_size: int) -> dict[str, int]:
        """The degrees, with -1 worked out. Raises UserError where they do not multiply to `world_size`."""
        given = {key: getattr(self, key) for key in DEGREES}
        known = prod(degree for degree in given.values() if degree != -1)
        rest = next((key for key, degree in given.items() if degree == -1), None)
        fits = world_size % known == 0 if rest is not None else known == world_size
        if not fits:
            key = rest or next((key for key in DEGREES if given[key] > 1), "shard")
            product = " x ".join(f"{name} {spelled(degree)}" for name, degree in given.items() if degree != 1)
            start = "parallel.processes=N starts N, torchrun and others by their own options"
            expect(
                False,
                f"parallel.{key}",
                given[key],
                f"degrees ({product or 'all 1'}) that multiply to the number of processes, which is "
                f"{world_size} ({start})",
            )
        return {key: world_size // known if degree == -1 else degree for key, degree in given.items()}
