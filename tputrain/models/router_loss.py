"""The router's loss of transformers' mixtures of experts: small where experts get equally many tokens."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

_BALANCE = "load_balancing_loss_func"
"""What transformers calls it, in the module of each such model."""


def register(model: Any) -> None:
    """Have transformers compute it of all tokens where a model gets a mask of pairs: it knows masks of tokens
    alone.
    """
    module = sys.modules[type(model).__module__]
    balance = getattr(module, _BALANCE, None)
    if balance is not None and not hasattr(balance, "__wrapped__"):
        setattr(module, _BALANCE, _of_all_tokens(balance))


def _of_all_tokens(balance: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(balance)
    def balanced(
        gate_logits: Any, num_experts: Any = None, top_k: Any = 2, attention_mask: Any = None
    ) -> Any:
        of_tokens = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        return balance(gate_logits, num_experts, top_k, attention_mask if of_tokens else None)

    return balanced


def of_step(model: Any, outputs: Any) -> Tensor | None:
    """What a training step adds to the loss, by the model's own coefficient; None: the model's config does
    not ask for it (`output_router_logits`), or it is evaluated.
    """
    loss = getattr(outputs, "aux_loss", None)
    if loss is None or not model.training:
        return None
    config = model.config.get_text_config()
    name = "router_aux_loss_coef" if hasattr(config, "router_aux_loss_coef") else "aux_loss_coef"
    coefficient: float = getattr(config, name)
    return coefficient * loss
