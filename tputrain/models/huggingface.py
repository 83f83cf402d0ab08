"""Any causal language model of Hugging Face's `transformers`, as the Trainer's batches ask for it."""

import inspect
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tputrain.batches import IGNORED_LABEL
from tputrain.errors import UserError
from tputrain.models.llama import attention_bias

INITS = ("weights", "random")


def load_huggingface(path: str, init: str = "weights", seed: int = 0) -> nn.Module:
    """The causal language model at `path`, a directory or a name on the hub, with float32 weights.

    `init`: its weights, or random ones by `seed`, drawn as `transformers` does. Parameters keep their names,
    so a checkpoint is a directory that `from_pretrained` reads; forward is that of `tputrain.models.Llama`:
    labels are the next tokens, documents in a sequence do not see each other. Code that comes with a model is
    never run. Raises UserError where it cannot be had.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise UserError(
            "model.name=huggingface: expected the package transformers: pip install 'tputrain[huggingface]'"
        ) from None
    try:
        if init == "weights":
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                config = AutoConfig.from_pretrained(path)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"model.path={path}: cannot be loaded ({reason})") from None
    _adapt(model)
    return model


def limits(path: str) -> tuple[int | None, int | None]:
    """Positions and vocabulary of the model in a local directory, where its config.json says them."""
    try:
        config = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None  # a name on the hub, or what `load_huggingface` will refuse
    if not isinstance(config, dict):
        return None, None
    return config.get("max_position_embeddings", config.get("n_positions")), config.get("vocab_size")


def _adapt(model: Any) -> None:
    """Give `model` the forward of this library's models, and a `save_config` for its checkpoints."""
    forward = model.forward
    takes_positions = "position_ids" in inspect.signature(forward).parameters

    def adapted(
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        # A mask of four dimensions is taken as it is: nothing is derived from values, nothing read.
        mask = attention_bias(places, document_ids, model.dtype)[:, 0]
        positions = places[None] if position_ids is None else position_ids
        extra = {"position_ids": positions} if takes_positions else {}
        logits = forward(input_ids=input_ids, attention_mask=mask, use_cache=False, **extra).logits
        if labels is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL)

    def save_config(directory: Path) -> None:
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(directory)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(directory)

    model.forward, model.save_config = adapted, save_config
