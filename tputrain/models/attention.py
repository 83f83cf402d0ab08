"""Attention of grouped queries: which tokens see which, and who computes it.

A mask is one of three:

- None: a token sees all earlier ones, and itself.
- int64 (B, S): the document of each token. It sees the earlier ones of its own document.
- bool (B or 1, 1, S, T): each row says which columns it sees.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain import device as devices
from tputrain.models.sequence import is_split, whole


def causal_mask(own: Tensor, every: Tensor, document_ids: Tensor | None) -> Tensor | None:
    """The mask for rows at the places `own` (S,) and columns at the places `every` (T,).

    `document_ids` (B, S) are those of the rows. None: all tokens are of one document.
    """
    if own is every and (document_ids is None or (document_ids.device.type == "tpu" and not is_split())):
        return document_ids
    return visible(own, every, document_ids)


def visible(own: Tensor, every: Tensor, document_ids: Tensor | None) -> Tensor:
    """True where a token (row) may attend to another (column): bool (B or 1, 1, S, T)."""
    allowed = (own[:, None] >= every[None, :])[None]
    if document_ids is not None:
        allowed = allowed & (document_ids[:, :, None] == whole(document_ids, 1)[:, None, :])
    return allowed[:, None]


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The values (B, K, T, D), mixed for each of the queries (B, H, S, D): (B, H, S, D).

    G = H / K query heads in a row share a head of keys (B, K, T, D). Scores are divided by sqrt(D). Where
    ranks share a sequence, keys and values are this rank's part.
    """
    if mask is not None and mask.dtype != torch.bool:
        return devices.document_attention()(query, key, value, mask)
    # By this name: context parallelism takes its place there.
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
