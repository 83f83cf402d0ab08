"""Attention of grouped queries: which tokens see which, and who computes it.

A mask is one of three:

- None: a token sees all earlier ones, and itself.
- int64 (B, S) or (B, S + T): the document of each token; with T more numbers those of rows, then of columns.
  A token sees the earlier ones of its own document.
- bool (B or 1, 1, S, T): each row says which columns it sees.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain import device as devices
from tputrain.models.sequence import attend_to_whole, is_split, whole


def causal_mask(own: Tensor, every: Tensor, document_ids: Tensor | None) -> Tensor | None:
    """The mask for rows at the places `own` (S,) and columns at the places `every` (T,).

    `document_ids` (B, S) are those of the rows. None: all tokens are of one document.
    """
    if is_split():
        return None if document_ids is None else torch.cat([document_ids, whole(document_ids, 1)], 1)
    if own is every and (document_ids is None or document_ids.device.type == "tpu"):
        return document_ids
    return pairs(own, every, document_ids)


def pairs(own: Tensor, every: Tensor, mask: Tensor | None, window: int | None = None) -> Tensor:
    """A mask as the bool (B or 1, 1, S, T) that it stands for.

    `window`: how many tokens each one sees at most, itself included.
    """
    distances = (own[:, None] - every[None, :])[None]
    if mask is not None and mask.dtype == torch.bool:
        return mask if window is None else mask & (distances < window)[:, None]
    allowed = distances >= 0
    if window is not None:
        allowed = allowed & (distances < window)
    if mask is not None:
        rows, columns = mask[:, : len(own)], mask[:, -len(every) :]
        allowed = allowed & (rows[:, :, None] == columns[:, None, :])
    return allowed[:, None]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The values (B, K, T, E), mixed for each of the queries (B, H, S, D): (B, H, S, E).

    G = H / K query heads in a row share a head of keys (B, K, T, D). Scores are divided by sqrt(D), or
    multiplied by `scale`. Where ranks share a sequence, keys and values are this rank's part. `window`: how
    many tokens each one sees at most, itself included; a mask of pairs has it in the pairs.
    """
    if mask is not None and mask.dtype == torch.bool:
        if window is not None:
            raise ValueError("attend: a window is for causal masks, not for pairs")
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    if is_split():
        return attend_to_whole(query, key, value, mask, scale, window)
    length = query.shape[2]
    if mask is None and window is not None:
        mask = torch.zeros(1, length, dtype=torch.int64, device=query.device)
    if mask is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    options: dict[str, Any] = {"scale": scale, "window": window}
    if mask.shape[1] > length:
        mask, options["key_document_ids"] = mask[:, :length], mask[:, length:]
    return devices.document_attention()(query, key, value, mask, **options)
