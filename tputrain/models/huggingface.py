"""Any causal language model of Hugging Face's `transformers`, as the Trainer's batches ask for it."""

import inspect
import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tputrain.checkpoint.named_directory import model_directory
from tputrain.config_checks import did_you_mean, nearest, spelled
from tputrain.errors import UserError, first_line
from tputrain.hub import asking_hub, is_path
from tputrain.models import router_loss, transformers_masks
from tputrain.models.attention import causal_mask, pairs
from tputrain.models.recompute import Setting, kinds_of, recomputed_call
from tputrain.models.sequence import places
from tputrain.models.vocabulary_loss import VocabularyHead, loss_of_head, next_token_loss, pays

CONFIG = "config.json"
INITS = ("weights", "random")
_HEAD_DIM = "head_dim"
"""A setting that many models of transformers read though their configurations do not name it."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as transformers' configurations name them."""
_TAKES_PARTS = {
    *("cohere", "cohere2", "gemma", "gemma3_text", "glm4", "gpt_neox", "granite", "granitemoe", "helium"),
    *("llama", "ministral", "ministral3", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "olmoe"),
    *("persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
    *("stablelm", "starcoder2"),
}
"""Types of models (`model_type`) whose sequences plans may divide among context ranks by themselves.

A type is a member if tests/parallel/test_context_types.py compares its losses on two context ranks with those
of one process; add both together. Any other type runs with `parallel.context` if the recipe sets it.
"""


def load_huggingface(
    path: str, init: str = "weights", seed: int = 0, activation_checkpointing: Setting = False
) -> nn.Module:
    """The causal language model at `path`, a directory, a run or a name on the hub, with float32 weights.

    `init`: its weights, or random ones by `seed`, drawn as `transformers` does. Parameters keep their names,
    so a checkpoint is a directory that `from_pretrained` reads; forward is that of `tputrain.models.Llama`:
    labels are the next tokens, documents in a sequence do not see each other. `activation_checkpointing`:
    layers are computed again in the backward pass, or some ([layers, none]). Code that comes with a model is
    never run. Raises UserError where it cannot be had.
    """
    transformers = _transformers()
    expected = "a directory with config.json and weights, a run, or a name on the hub (and a network)"
    directory = model_directory(path)
    if directory is None and is_path(path):
        raise UserError(f"model.path={path}: no such directory; expected {expected}")
    try:
        with nullcontext() if directory else asking_hub(f"model.path={path}"):
            if init == "random":
                config = transformers.AutoConfig.from_pretrained(directory or path)
                return _adapted(_random(transformers, config, seed), activation_checkpointing)
            model = transformers.AutoModelForCausalLM.from_pretrained(directory or path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise UserError(
            f"model.path={path}: cannot be loaded: {first_line(error)}; expected {expected}"
        ) from None
    return _adapted(model, activation_checkpointing)


def build_huggingface(
    config: Mapping[str, Any], seed: int = 0, activation_checkpointing: Setting = False
) -> nn.Module:
    """The causal language model that `config` describes: `model_type` and that type's own settings, with
    random weights by `seed`. Raises UserError for a type or a setting that `transformers` does not know.
    """
    transformers = _transformers()
    settings = dict(config)
    kind = settings.pop("model_type", None)
    try:
        known = transformers.AutoConfig.for_model(kind)
    except ValueError:
        hint = None if kind is None else nearest(str(kind), list(transformers.CONFIG_MAPPING))
        raise UserError(
            f"model.config.model_type={spelled(kind)}: expected one that transformers knows, "
            f"such as gpt2{did_you_mean(hint)}"
        ) from None
    names = [*known.to_dict(), *known.attribute_map]
    for name, value in settings.items():
        if name not in names and name != _HEAD_DIM:
            raise _unknown(name, value, kind, names)
    try:
        model = _random(transformers, transformers.AutoConfig.for_model(kind, **settings), seed)
    except Exception as error:  # what checks of settings raise has no common type
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"model.config: transformers makes no {kind} of it ({reason})") from None
    if _HEAD_DIM in settings and _HEAD_DIM not in names:
        value = settings[_HEAD_DIM]
        if not any(getattr(module, _HEAD_DIM, None) == value for module in model.modules()):
            raise _unknown(_HEAD_DIM, value, kind, names)
    return _adapted(model, activation_checkpointing)


def _unknown(name: str, value: Any, kind: Any, names: list[str]) -> UserError:
    hint = did_you_mean(nearest(name, names))
    return UserError(f"model.config.{name}={value}: unknown to {kind}; expected one of its settings{hint}")


def limits(path: str) -> tuple[int | None, int | None]:
    """Positions and vocabulary of the model in a local directory, where its config.json says them."""
    directory = model_directory(path, only=(CONFIG,))
    if directory is None:
        return None, None  # a name on the hub, or what `load_huggingface` will refuse
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None, None
    return limits_said(config) if isinstance(config, dict) else (None, None)


def limits_said(config: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Positions and vocabulary where a model's configuration says them, in numbers."""
    given = config.get("max_position_embeddings", config.get("n_positions")), config.get("vocab_size")
    positions, vocab_size = (number if isinstance(number, int) else None for number in given)
    return positions, vocab_size


def _transformers() -> Any:
    try:
        import transformers  # seconds, and only who asks for such a model needs it
    except ImportError:
        raise UserError(
            "model.name=huggingface: expected the package transformers: pip install 'tputrain[huggingface]'"
        ) from None
    return transformers


def _random(transformers: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _adapted(model: Any, activation_checkpointing: Setting) -> nn.Module:
    """`model` with the forward of this library's models."""
    transformers_masks.register()
    router_loss.register(model)
    if getattr(model.config.get_text_config(), "use_bidirectional_attention", False):
        raise UserError(
            f"{type(model).__name__}: its config has use_bidirectional_attention=True: expected a causal "
            "model, whose tokens see the earlier ones alone"
        )
    forward = model.forward
    takes_positions = "position_ids" in inspect.signature(forward).parameters
    windows = _windows(model.config)
    head = _Head(model.get_output_embeddings())
    if activation_checkpointing:
        _recompute_layers(model, activation_checkpointing)

    def adapted(
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor | dict[str, Tensor]:
        own, every = places(input_ids.shape[1], input_ids.device)
        seen = causal_mask(own, every, document_ids)
        cuts = {
            kind: window for kind, window in windows.items() if window is not None and window < len(every)
        }
        if cuts and not cuts.keys() <= {_FULL, _SLIDING}:
            raise UserError(
                f"a {model.config.model_type} of transformers: a sequence of {len(every)}: expected at most "
                f"{min(cuts.values())}, its config's sliding_window: with layers of its kinds it must not cut"
            )

        def mask_of(window: int | None) -> Tensor:
            # A mask of four dimensions is taken as it is: nothing is derived from values, nothing read. On
            # the device nobody makes its pairs where attention needs no more than documents and window.
            mask = torch.where(pairs(own, every, seen, window), 0.0, -math.inf).to(model.dtype)
            transformers_masks.attach_documents(mask, seen, window)
            return mask

        masks = {kind: mask_of(cuts.get(kind)) for kind in (windows if cuts else [""])}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        positions = own[None] if position_ids is None else position_ids
        extra = {"position_ids": positions} if takes_positions else {}
        head.forget()  # of a call that failed behind it
        outputs = forward(input_ids=input_ids, attention_mask=mask, use_cache=False, **extra)
        logits = outputs.logits
        made = head.made(logits)
        if labels is None:
            return logits
        loss = None
        if (
            made is not None
            and not model.gives_logits_with_loss
            and (head.module.is_divided or pays(made.hidden, made.weight))
        ):
            # Where there is such a loss nobody wants the logits: what was recorded of them is not run.
            loss = loss_of_head(head.module, made.hidden, labels, num_own_hooks=1)
        if loss is None:
            loss = next_token_loss(logits, labels)
        if (of_router := router_loss.of_step(model, outputs)) is not None:
            loss = loss + of_router
        return {"loss": loss, "logits": logits} if model.gives_logits_with_loss else loss

    model.forward, model.gives_logits_with_loss = adapted, False
    model.takes_parts = model.config.model_type in _TAKES_PARTS
    return model


class _Made(NamedTuple):
    """What a head's results were made of."""

    hidden: Tensor
    weight: Tensor


class _Head:
    """Watches a model's head. Where the model gives its results as they are, the loss can be had without."""

    def __init__(self, head: nn.Module | None):
        self.module: Any = None
        self._last: tuple[Tensor, _Made] | None = None
        if type(head) is nn.Linear:
            head.__class__ = VocabularyHead
            head.register_forward_hook(self._note)
            self.module = head

    def _note(self, head: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if len(inputs) == 1 and not torch.compiler.is_compiling():
            self._last = output, _Made(inputs[0], head.weight)

    def made(self, logits: Tensor) -> _Made | None:
        """What these were made of, if they are the results of its last call, which is forgotten."""
        last, self._last = self._last, None
        return last[1] if last is not None and last[0] is logits else None

    def forget(self) -> None:
        """Hold nothing of its last call."""
        self._last = None


def _windows(config: Any) -> dict[str, int | None]:
    """How many tokens the layers of each kind see at most, a token itself included; None: the whole sequence.

    A model whose layers are of several kinds takes a mask for each by these names.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    kinds = sorted(set(getattr(text, "layer_types", None) or [_SLIDING]))
    if kinds == [_FULL] and window is not None:
        return {"": window}  # some such models cut these layers, and some do not
    return {kind: None if kind == _FULL else window for kind in kinds}


def _recompute_layers(model: Any, setting: Setting) -> None:
    """Have the layers of `model` computed again in the backward pass, by transformers' own switch."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # it is there: it made the model

    switch = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    try:
        switch()
    except ValueError:
        raise UserError(
            f"model.activation_checkpointing=True: expected false, {type(model).__name__} of transformers "
            "does not support it"
        ) from None
    switched = [module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")]
    layers = [module for module in switched if isinstance(module, GradientCheckpointingLayer)] or switched
    for layer, kind in zip(layers, kinds_of(setting, len(layers)), strict=True):
        layer._gradient_checkpointing_func = partial(recomputed_call, kind=kind)
        layer.recomputes = kind
