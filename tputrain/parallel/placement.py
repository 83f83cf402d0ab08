"""Which dimension of a parameter FSDP cuts: rows, unless a rule of `parallel.placement` names another."""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.distributed.tensor import Shard

from tputrain.announce import say
from tputrain.errors import UserError
from tputrain.parallel.tensor_plan import in_short


def placements(
    model: nn.Module, rules: Mapping[str, Sequence[str | None]], degree: int
) -> Callable[[nn.Parameter], Shard | None]:
    """What `fully_shard` asks of each parameter of `model`.

    Of several rules that match its name the last one counts. A line lists the rules that match nothing, and
    the parameters that no rule matches. Raises UserError for a rule that does not fit a parameter, or a
    dimension that does not divide into `degree` parts.
    """
    chosen: dict[int, Shard] = {}
    unused, left = list(rules), []
    for name, parameter in model.named_parameters():
        matching = [pattern for pattern in rules if fnmatchcase(name, pattern)]
        unused = [pattern for pattern in unused if pattern not in matching]
        if matching:
            chosen[id(parameter)] = _placement(name, parameter, matching[-1], rules[matching[-1]], degree)
        else:
            left.append(name)
    for pattern in unused:
        say(f"note: parallel.placement: no parameter of the model matches {pattern}")
    if rules and left:
        say(f"note: parallel.placement: cut by rows, as no rule matches them: {in_short(left)}")
    return lambda parameter: chosen.get(id(parameter))


def _placement(
    name: str, parameter: nn.Parameter, pattern: str, rule: Sequence[str | None], degree: int
) -> Shard:
    shape, dim = tuple(parameter.shape), list(rule).index("shard")
    who = f"parallel.placement.{pattern}={list(rule)}: {name} has the shape {shape}"
    if len(rule) != len(shape):
        raise UserError(f"{who}: expected a rule of {len(shape)} dimensions")
    if dim > 0 and shape[dim] % degree:  # rows alone may be cut into unequal parts
        raise UserError(f"{who}: expected a dimension that {degree} ranks divide, or its rows ([shard, ...])")
    return Shard(dim)
