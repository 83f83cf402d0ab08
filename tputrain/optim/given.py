"""An optimizer that was built on whole parameters, made one over the parts of them that a rank has."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import divided_like


@torch.no_grad()
def train_parts(optimizer: torch.optim.Optimizer, model: nn.Module, names: Mapping[int, str]) -> None:
    """Have `optimizer` train the parameters of `model` in the place of those it was built on, which the model
    had before it was divided. What its state holds in the shape of a parameter is divided as that is.

    `names`: of the model's parameters before, by their identities. Others are left for `check_ownership`.
    """
    parameters = dict(model.named_parameters())
    parts = {number: parameters[name] for number, name in names.items()}
    for group in optimizer.param_groups:
        group["params"] = [parts.get(id(each), each) for each in group["params"]]
    for whole in [each for each in optimizer.state if id(each) in parts]:
        part = parts[id(whole)]
        optimizer.state[part] = {
            key: divided_like(value, part)
            if isinstance(value, Tensor) and value.shape == part.shape
            else value
            for key, value in optimizer.state.pop(whole).items()
        }
