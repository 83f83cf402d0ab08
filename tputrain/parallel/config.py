"""How a run is laid out over many devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from tputrain.config_checks import Settings, did_you_mean, expect, expect_at_least, nearest, spelled
from tputrain.errors import UserError
from tputrain.parallel.cluster import hosts

DEGREES = ("replicate", "shard", "tensor", "context")


class TensorRule(NamedTuple):
    """How tensor parallelism treats a module: what it takes, computes with, and gives."""

    style: str
    """colwise: cut by outputs; rowwise: by inputs (an embedding: by entries); sequence: whole parameters on
    a part of the sequence; parts: whole parameters on whatever part a rank has; whole: not at all."""
    input: str | None = None
    """Layout of the input: replicate, sequence, features; None: the style's own."""
    output: str | None = None

    @classmethod
    def of(cls, pattern: str, value: Any, source: str = "parallel.plan") -> "TensorRule":
        """A rule as it is written: a style's name, or {style, input, output}."""
        key = f"{source}.{pattern}"
        if isinstance(value, str) and value in _RULES:
            return _RULES[value]
        styles = f"one of {', '.join(_RULES)}"
        if not isinstance(value, Mapping):
            expect(False, key, value, f"{styles}{did_you_mean(nearest(str(value), _RULES))}")
        expect("style" in value and set(value) <= set(cls._fields), key, value, "{style, input, output}")
        rule = cls(**value)
        expect(rule.style in _RULES, f"{key}.style", rule.style, styles)
        rule = _RULES[rule.style]._replace(**{name: each for name, each in value.items() if name != "style"})
        for name in ("input", "output"):
            layout = getattr(rule, name)
            expect(
                layout is None or layout in _LAYOUTS, f"{key}.{name}", layout, f"one of {', '.join(_LAYOUTS)}"
            )
        takes_layouts = rule.style in ("colwise", "rowwise", "sequence") or rule[1:] == (None, None)
        expect(takes_layouts, key, value, f"no input and no output with the style {rule.style}")
        return rule


_LAYOUTS = ("replicate", "sequence", "features")
# The names of torch.distributed.tensor.parallel's styles in short, and what transformers calls them.
_RULES = {
    "colwise": TensorRule("colwise"),
    "rowwise": TensorRule("rowwise"),
    "sequence": TensorRule("sequence"),
    "parts": TensorRule("parts"),
    "whole": TensorRule("whole"),
    "colwise_gather_output": TensorRule("colwise", output="replicate"),
    "colwise_rep": TensorRule("colwise", output="replicate"),
    "rowwise_split_input": TensorRule("rowwise", input="replicate"),
    "rowwise_rep": TensorRule("rowwise", input="replicate"),
    "embedding_rowwise": TensorRule("rowwise"),
    "embedding_colwise": TensorRule("colwise", output="replicate"),
    "replicated_with_grad_allreduce": TensorRule("parts"),
    "replicate": TensorRule("whole"),
}


def is_style(name: str) -> bool:
    """Whether a rule may be this name alone."""
    return name in _RULES


@dataclass(frozen=True)
class ParallelConfig(Settings):
    """Degrees, whose product is the number of processes; one of them may be -1, which is the rest."""

    auto: bool = False
    """Whether a plan chooses the degrees, for the chips that the ranks have. `parallel: auto` is short for
    it."""
    replicate: int = 1
    """Copies of the model, each of which takes a part of the batch."""
    shard: int = 1
    """Parts of weights, gradients and optimizer state (FSDP); each rank takes a part of the batch."""
    tensor: int = 1
    """Parts that a layer's matrices are cut into, by `plan`; ranks that share a layer share a batch."""
    context: int = 1
    """Parts that each sequence of a batch is cut into; attention gathers the keys and values of all."""
    processes: int = 1
    """Processes that `tputrain run` starts on this machine, one a device. A launcher's own number wins."""
    restarts: int = 3
    """How often `tputrain run` starts them again after one has failed. A launcher's own number wins."""
    plan: dict[str, Any] = field(default_factory=dict, hash=False)
    """With tensor: by patterns of module names, a style (colwise, rowwise, sequence, parts, whole) or
    {style, input, output}. Empty: the model's own, its attribute tp_plan."""

    placement: dict[str, Any] = field(default_factory=dict, hash=False)
    """By patterns of parameter names, which dimension shard cuts: [shard, null] (rows, as without a rule) or
    [null, shard] (columns). Of several rules the last one counts."""

    def __post_init__(self) -> None:
        for key in DEGREES:
            degree = getattr(self, key)
            expect(degree == -1 or degree >= 1, f"parallel.{key}", degree, "1 or more, or -1 for the rest")
        rest = [key for key in DEGREES if getattr(self, key) == -1]
        if len(rest) > 1:
            expect(False, f"parallel.{rest[1]}", -1, f"a number: parallel.{rest[0]} is the rest already")
        given = next((key for key in DEGREES if getattr(self, key) != 1), None)
        if self.auto and given is not None:
            expect(False, f"parallel.{given}", getattr(self, given), "no degrees with parallel.auto")
        expect_at_least("parallel.processes", self.processes, 1)
        expect_at_least("parallel.restarts", self.restarts, 0)
        for pattern, rule in self.plan.items():
            TensorRule.of(pattern, rule)
        expect(
            1 in (self.context, self.tensor),
            "parallel.context",
            self.context,
            "1 with parallel.tensor so far",
        )
        for pattern, dims in self.placement.items():
            is_one = isinstance(dims, Sequence) and list(filter(None, dims)) == ["shard"]
            expect(
                is_one,
                f"parallel.placement.{pattern}",
                dims,
                "shard for one dimension, null for others: [shard, null]",
            )
        if self.processes > 1 and not self.auto:
            self.resolved(self.processes * hosts().size)

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
        if not fits and known == 1:
            raise UserError(
                f"parallel: there are {world_size} processes, and nothing says how to divide the work: add "
                f"parallel.shard={world_size} (or parallel.replicate={world_size}, or parallel=auto)"
            )
        if not fits:
            key = rest or next((key for key in DEGREES if given[key] > 1), "shard")
            product = " x ".join(f"{name} {spelled(degree)}" for name, degree in given.items() if degree != 1)
            start = f"parallel.processes={known} starts {known}, torchrun and others by their own options"
            expect(
                False,
                f"parallel.{key}",
                given[key],
                f"degrees ({product or 'all 1'}) that multiply to the number of processes, which is "
                f"{world_size} ({start})",
            )
        return {key: world_size // known if degree == -1 else degree for key, degree in given.items()}
