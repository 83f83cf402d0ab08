"""Text from a model, one token at a time."""

import inspect
import time
import unicodedata
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tputrain.checkpoint.rows import is_distributed
from tputrain.data import Tokenizer
from tputrain.data.conversations import beginning
from tputrain.errors import UserError

_PAYS_FROM = 64
"""New tokens from which another program, for one token, takes less than it saves."""
_SMALLEST = 64
"""The window of a short text."""
_EXPECTED = "expected logits of shape (sequences, tokens, vocabulary), of which text is drawn"


@dataclass
class Speed:
    """How fast a text was written, by calls of the model that compile nothing."""

    num_given: int = 0
    """Tokens of the prompt."""
    prefill: float = 0.0
    """Seconds of the call that takes them in."""
    seconds: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each further token, by the number of tokens that the model was called with."""

    @property
    def said(self) -> str:
        """For people."""
        found = f"prefill {self.num_given} tokens, {self.num_given / self.prefill:.4g} tokens/s"
        warm = [seconds for times in self.seconds.values() for seconds in times[1:]]  # the first may compile
        if not warm:
            return f"{found}; decoding not measured, as each call may have compiled"
        rate = f"{len(warm) / sum(warm):.4g} tokens/s"
        return f"{found}; decoding {rate} (by {len(warm)} tokens whose calls compiled nothing)"


def why_silent(model: nn.Module) -> str | None:
    """Why a model cannot write text, in words for its author; None: it may be able to."""
    try:
        inspect.signature(model.forward).bind(object())
    except ValueError:  # it has no signature
        return None
    except TypeError as error:
        return f"{type(model).__name__}.forward cannot be called with token ids alone: {error}; {_EXPECTED}"
    return None


@torch.no_grad()
def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    window: int = 128,
    speed: Speed | None = None,
    in_conversation: bool = False,
) -> str:
    """The prompt and up to `max_new_tokens` tokens after it, ended early where the model ends the document.

    The model sees the last `window` tokens (best: the length it was trained on). A token is one read of the
    logits of one position, from which the host draws: the same seed draws the same numbers on every device.
    `temperature=0` takes the most likely token.

    Calls of the model have few shapes, so that a compiling device compiles few programs. Where the model has
    a `new_cache` for the keys and values of the tokens so far, and the text is long enough for it to pay, it
    is called once with the prompt, and then with one token. Else it is called with the whole text. Prompt and
    text are padded to a power of two, from 64 up to the window. Once the window is full it moves, and is
    computed whole for each token.

    `in_conversation`: the model was trained on conversations. With a chat template the prompt is then what a
    user says, and the text that follows is the answer; or it spells out the template's special tokens itself.

    `speed` is filled in. The prompt is then computed twice, as the first time may compile.

    Raises UserError for a model that does not give logits of token ids, and for settings out of range.
    """
    if (why := why_silent(model)) is not None:
        raise UserError(why)
    if temperature < 0:
        raise UserError(f"temperature={temperature}: expected 0 or more")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k={top_k}: expected at least 1")
    device = next(model.parameters()).device
    uniforms = np.random.Philox(key=seed % 2**64)
    ids, shown, ends = beginning(prompt, tokenizer, in_conversation)
    num_given = len(ids)
    cache = _new_cache(model, window) if max_new_tokens >= _PAYS_FROM else None
    whole = _padded(num_given + max_new_tokens, window)
    was_training = model.training
    model.eval()
    try:
        for number in range(max_new_tokens):
            if cache is None or len(ids) > window:
                cache, size = None, whole
            else:
                size = _padded(num_given, window) if number == 0 else 1
            if speed is not None and number == 0:
                again = None if cache is None else _new_cache(model, window)
                _next_logits(model, ids, size, device, again)
            began = time.perf_counter()
            logits = _next_logits(model, ids, size, device, cache).numpy()
            if speed is not None:
                _note(speed, number, num_given, size, time.perf_counter() - began)
            token = _draw(logits[: tokenizer.vocab_size], temperature, top_k, uniforms)
            if token == tokenizer.end_of_text_id or token in ends:
                break
            ids.append(token)
    finally:
        model.train(was_training)
    return shown + tokenizer.decode(ids[num_given:])


def _new_cache(model: Any, window: int) -> Any:
    """What lets the model go on from what it has computed; None if it is compiled, or ranks have parts."""
    can_cache = hasattr(type(model), "new_cache") and not any(map(is_distributed, model.parameters()))
    return model.new_cache(window) if can_cache else None


def _padded(num_tokens: int, window: int) -> int:
    """The tokens that the model is called with for so many, or for the last of them."""
    return min(window, max(_SMALLEST, 1 << (num_tokens - 1).bit_length()))


def _note(speed: Speed, number: int, num_given: int, size: int, seconds: float) -> None:
    if number == 0:
        speed.num_given, speed.prefill = min(num_given, size), seconds
    else:
        speed.seconds[size].append(seconds)


def _next_logits(model: nn.Module, ids: list[int], size: int, device: torch.device, cache: Any) -> Tensor:
    """float32 logits (V,), on the host, for the token after `ids`, of which the model sees the last `size`;
    with a cache it has seen those before.
    """
    options = {}
    if cache is not None:
        first = max(0, len(ids) - size)
        options = {"cache": cache, "position_ids": torch.arange(first, first + size)[None].to(device)}
    ids = ids[-size:]
    # Padding comes after the text, where causal attention does not look.
    padded = torch.tensor([ids + [0] * (size - len(ids))]).to(device)
    last = torch.tensor([len(ids) - 1]).to(device)  # a tensor: as a number it would be part of the program
    logits = model(padded, **options)
    if isinstance(logits, Mapping):
        logits = logits.get("logits")
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[1] != size:
        gave = (
            f"a tensor of {list(logits.shape)}" if isinstance(logits, Tensor) else f"{type(logits).__name__}"
        )
        raise UserError(f"{type(model).__name__} gave {gave} for token ids alone: {_EXPECTED}")
    return logits.index_select(1, last).flatten().float().cpu()


def _draw(logits: np.ndarray, temperature: float, top_k: int | None, uniforms: np.random.Philox) -> int:
    if temperature == 0:
        return int(logits.argmax())
    # Likeliest first, ties by id, so that the draw does not depend on how a sort breaks them.
    candidates = np.argsort(-logits, kind="stable")[:top_k]
    scaled = logits[candidates].astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max()).cumsum()
    uniform = (int(uniforms.random_raw()) >> 11) * 2.0**-53
    return int(candidates[np.searchsorted(weights, uniform * weights[-1], side="right")])


def printable(text: str) -> str:
    """The text with control characters escaped, which a terminal would act on; lines and tabs stay."""
    return "".join(
        ascii(each)[1:-1] if unicodedata.category(each) == "Cc" and each not in "\n\t" else each
        for each in text
    )
