"""Attention of transformers' models without pairs of tokens in memory, where their mask is causal.

Models of transformers give attention a mask of pairs. We attach to that tensor of which documents its tokens
are. Where their attention `sdpa` gets such a tensor, it gives the documents to the device. Then nobody asks
for the pairs, so the device does not compute them.

Everything else has its mask of pairs as before: another attention, a mask that the model changes, dropout, a
cache of keys, torch.compile.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain.models.attention import attend
from tputrain.models.sequence import is_split

_DOCUMENTS = "_tputrain_documents"
_ATTENTION = F.scaled_dot_product_attention
_KNOWN: dict[str, set[str]] = {
    "causal_mask_function": set(),
    "sliding_window_overlay": {"sliding_window"},
    "remap_positions_for_packed_sequence": {"position_ids", "mask_function"},
    "packed_sequence_mask_function": {"packed_sequence_mask"},
}
"""Functions of transformers that masks are made of, and the variables of theirs that say with what."""


class Said(NamedTuple):
    """What a mask is, as `attend` takes it."""

    documents: Tensor | None
    window: int | None


def attach_documents(mask: Tensor, documents: Tensor | None, window: int | None = None) -> None:
    """Say that `mask` (B or 1, 1, S, T) is causal within these documents and within this window, as `attend`
    takes them.

    None: all tokens are of one document. Pairs are no documents: of them nothing is said. Neither under
    torch.compile, where nobody could see that the mask was written to since.
    """
    if (
        mask.device.type == "tpu"
        and (documents is None or documents.dtype != torch.bool)
        and window != 1  # `document_attention` has no such window
        and not torch.compiler.is_compiling()
        and not mask.is_inference()  # such a tensor has no version
    ):
        setattr(mask, _DOCUMENTS, (Said(documents, window), mask._version))


def attached_documents(mask: Any) -> Said | None:
    """Those that were attached to a mask, if it was not written to since."""
    attached = getattr(mask, _DOCUMENTS, None)
    if attached is None or torch.compiler.is_compiling() or mask._version != attached[1]:
        return None
    said: Said = attached[0]
    return said


def register() -> None:
    """Have transformers' masks carry documents, and its attention `sdpa` look for them, if it is imported.

    What somebody else registered by that name is left alone.
    """
    if "transformers.modeling_utils" in sys.modules:  # who has made one has imported it
        _register()


@cache
def _register() -> None:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
    except ImportError:  # a version that has no such names: masks of pairs, as before
        return
    if (
        AttentionInterface()["sdpa"] is sdpa_attention_forward
        and AttentionMaskInterface()["sdpa"] is sdpa_mask
    ):
        AttentionInterface.register("sdpa", _attention_with_documents(sdpa_attention_forward))
        AttentionMaskInterface.register("sdpa", _mask_with_documents(sdpa_mask))


def _attention_with_documents(attention: Callable[..., Any]) -> Callable[..., Any]:
    """Their attention, but for masks that have documents."""

    def sdpa(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> Any:
        said = attached_documents(attention_mask)
        if said is None or not _fits(query, key, value, attention_mask, **options):
            return attention(module, query, key, value, attention_mask, **options)
        mixed = attend(query, key, value, said.documents, options.get("scaling"), said.window)
        return mixed.transpose(1, 2).contiguous(), None

    return sdpa


def _fits(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> bool:
    """Whether the mask is all that attention needs to know, and it is over the tokens themselves."""
    return (
        (is_split() or F.scaled_dot_product_attention is _ATTENTION)  # else somebody has put theirs there
        and not dropout
        and position_bias is None
        and softcap is None
        and not output_attentions
        and key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and query.shape[1] % key.shape[1] == 0
        and mask.shape[2] == query.shape[2]
    )


def _mask_with_documents(make: Callable[..., Any]) -> Callable[..., Any]:
    """Their function that makes a mask, which then has documents where they say the same."""

    def sdpa_mask(*args: Any, **options: Any) -> Any:
        mask = make(*args, **options)
        # A compiler cannot look into functions. A part of a sequence has no mask of transformers.
        if isinstance(mask, Tensor) and not torch.compiler.is_compiling() and not is_split():
            found = _documents(**options)
            if found is not None:
                attach_documents(mask, *found)
        return mask

    return sdpa_mask


def _documents(
    *,
    q_length: Any = None,
    kv_length: Any = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> Said | None:
    """What a mask says. None: it is another one."""
    lengths_and_offsets = (q_length, kv_length, q_offset, kv_offset)
    if not all(isinstance(each, int) for each in lengths_and_offsets) or q_offset != 0 or kv_offset != 0:
        return None
    parts = [*_parts(mask_function)]
    said = dict(parts)
    if "causal_mask_function" not in said or len(said) != len(parts) or q_length != kv_length:
        return None
    if not all(name in _KNOWN and _KNOWN[name] <= set(variables) for name, variables in said.items()):
        return None
    window = said.get("sliding_window_overlay", {}).get("sliding_window")
    if window is not None and window >= kv_length:
        window = None
    packed = said.get("packed_sequence_mask_function", {}).get("packed_sequence_mask")
    if (packed is None) != ("remap_positions_for_packed_sequence" not in said):
        return None  # by positions tokens are causal within a document only
    if attention_mask is None:
        return Said(packed, window)
    if packed is not None or attention_mask.shape[1:] != (kv_length,):
        return None
    # All queries are of the document that is no padding: so they see what they did see. To transformers all
    # numbers but 0 are the same.
    of_keys = attention_mask.bool().long()
    return Said(torch.cat([torch.ones_like(of_keys), of_keys], 1), window)


def _parts(function: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What must all hold in a mask: the functions of transformers that it is made of, and with what."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        yield "unknown", {}
        return
    name, made_of = function.__qualname__.split(".")[0], inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        functions = made_of.get("mask_functions", (None,))
    else:
        yield name, made_of
        functions = [made_of["mask_function"]] if "mask_function" in made_of else []
    for each in functions:
        yield from _parts(each)
