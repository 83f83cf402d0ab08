"""Rules that say which dimension of a parameter FSDP cuts."""

import pytest
from torch import nn
from torch.distributed.tensor import Shard

from tputrain import ParallelConfig
from tputrain.errors import UserError
from tputrain.parallel.placement import placements


def model() -> nn.Module:
    return nn.ModuleDict(
        {"layers": nn.ModuleList(nn.Linear(4, 3) for _ in range(2)), "head": nn.Linear(3, 5)}
    )


def test_the_last_rule_that_matches_counts_and_what_none_matches_is_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    built = model()
    rules = {
        "layers.*.weight": [None, "shard"],
        "layers.1.*": ["shard", None],
        "layers.1.bias": ["shard"],
        "x": ["shard"],
    }
    chosen = placements(built, rules, 2)
    found = {name: chosen(parameter) for name, parameter in built.named_parameters()}
    assert found == {
        "layers.0.weight": Shard(1),
        "layers.0.bias": None,
        "layers.1.weight": Shard(0),
        "layers.1.bias": Shard(0),
        "head.weight": None,
        "head.bias": None,
    }
    said = capsys.readouterr()
    said = said.out + said.err
    assert "no parameter of the model matches x" in said
    assert "no rule matches them: layers.*.bias, head.weight, head.bias" in said


def test_a_rule_that_does_not_fit_is_refused_in_one_line() -> None:
    for rules, message in (
        ({"head.bias": [None, "shard"]}, r"head.bias has the shape \(5,\): expected a rule of 1 dimensions"),
        ({"head.weight": [None, "shard"]}, r"\(5, 3\): expected a dimension that 2 ranks divide"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            placements(model(), rules, 2)
        assert "\n" not in str(caught.value)
    for dims in (["shard", "shard"], [None, None], "shard", ["rows"]):
        with pytest.raises(UserError, match=r"parallel.placement.a=.*: expected shard for one dimension"):
            ParallelConfig(placement={"a": dims})
