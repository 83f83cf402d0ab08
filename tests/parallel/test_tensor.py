"""What tensor parallelism refuses. What it trains is in test_training.py."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import tensor_models

from tputrain.errors import UserError
from tputrain.models.llama import Llama
from tputrain.parallel.tensor_plan import parallelise_layers


@pytest.mark.parametrize(
    ("model", "plan", "degree", "message"),
    [
        (nn.Linear(2, 2), {}, 2, "parallel.tensor=2: Linear has no plan .*: expected an attribute tp_plan"),
        (
            Llama(replace(tensor_models.SHAPE, num_key_value_heads=1)),
            {},
            2,
            r"parallel.tensor=2: model.layers.0.self_attn.k_proj has 1 head of 6: expected .* 2 divides",
        ),
        (Llama(tensor_models.SHAPE), {"lm_head": "colwise"}, 4, "lm_head has 62 outputs: expected a number"),
        (Llama(tensor_models.SHAPE), {"*.norm": "rowwise"}, 2, "model.norm is a RMSNorm: expected a Linear"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_in_one_line(
    model: nn.Module, plan: dict[str, Any], degree: int, message: str
):
    with pytest.raises(UserError, match=message) as caught:
        parallelise_layers(model, cast(Any, SimpleNamespace(size=lambda: degree)), plan)
    assert "\n" not in str(caught.value)
