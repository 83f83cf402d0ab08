"""`document_attention`: causal attention within documents, without a mask of all pairs of tokens.

And the rules that say which attention is a kernel on a TPU, and how much of another is in memory at a time.
Nothing here needs JAX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

# PyTorch's own: where ranks share a sequence, `torch.nn.functional` has another one by its name.
_ATTENTION = F.scaled_dot_product_attention


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    *,
    key_document_ids: Tensor | None = None,
    place: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """`scaled_dot_product_attention` of tokens that see themselves and the earlier ones of their document.

    `query` is (B, H, L, E), `key` is (B, K, S, E) and `value` (B, K, S, F), where K divides H: H / K heads in
    a row share keys. All are of one dtype of floats; under autocast they are cast as there. `document_ids`
    (B or 1, L) are integers, of which a TPU looks at the lowest 32 bits. The result is (B, H, L, F). `scale`:
    of the scores, 1 / sqrt(E) unless given.

    `key_document_ids` (B or 1, S): the documents of the keys, where they differ from those of the queries.
    A token that nobody may see has a document of its own there, as padding has. `place`: an integer tensor
    without dimensions, the place of the first query among the keys; 0 unless given. A query sees no key
    after its own position. If S differs from L, give both. `window`: how many keys a query sees at most, its
    own position included (a sliding window); 2 or more.

    A mask would hold L x S truth values for each sequence. This makes one on other devices, in torch.func's
    transforms and in forward differentiation only. Raises ValueError or TypeError for what does not fit.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            each if each.dtype is torch.float64 else each.to(dtype) for each in (query, key, value)
        )
    _check(query, key, value, document_ids, key_document_ids, place)
    if window is not None and (not isinstance(window, int) or window < 2):
        raise ValueError(f"document_attention: expected a window of 2 tokens or more, got {window!r}")
    if kind != "tpu" or _is_transformed():
        rows, columns = (torch.arange(each.shape[2], device=query.device) for each in (query, key))
        distances = rows[:, None] + (0 if place is None else place) - columns
        seen = distances >= 0
        if window is not None:
            seen = seen & (distances < window)
        of_keys = document_ids if key_document_ids is None else key_document_ids
        seen = seen & (document_ids[:, :, None] == of_keys[:, None, :])
        return _ATTENTION(
            query, key, value, seen[:, None], scale=scale, enable_gqa=key.shape[1] < query.shape[1]
        )
    said = document_ids
    if key_document_ids is not None:
        batch = query.shape[0] if len(document_ids) != len(key_document_ids) else len(document_ids)
        parts = [document_ids, key_document_ids] + ([] if place is None else [place.reshape(1, 1)])
        said = torch.cat([each.long().expand(batch, -1) for each in parts], 1)
    mask = said[:, None, None, :]
    if window is not None and window < key.shape[2]:
        mask = mask.expand(-1, -1, window, -1)
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    # Where a mask would stand, the operation takes integers for documents (lowering/documents.py).
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, has_gradient, 0.0, True, scale=scale
    )[0]
    return output


def _is_transformed() -> bool:
    """Whether derivatives are asked for that the operation lacks: forward ones, and those of torch.func."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_ids: Tensor,
    key_document_ids: Tensor | None,
    place: Tensor | None,
) -> None:
    of_keys = document_ids if key_document_ids is None else key_document_ids
    ids = (document_ids,) if key_document_ids is None else (document_ids, key_document_ids)
    shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value, *ids))
    fits = (
        query.dim() == key.dim() == 4
        and key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and query.shape[3] == key.shape[3]
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] > 0
        and document_ids.dim() == of_keys.dim() == 2
        and all(each.shape[0] in (1, query.shape[0]) for each in ids)
        and document_ids.shape[1] == query.shape[2]
        and of_keys.shape[1] == key.shape[2]
        and (query.shape[2] == key.shape[2] or place is not None)
    )
    if not fits:
        raise ValueError(
            "document_attention: expected (B, H, L, E), (B, K, S, E), (B, K, S, F) and (B, L), where K "
            "divides H; and where S is not L, key_document_ids (B, S) and place; "
            f"got {shapes}{'' if place is None else ' and a place'}"
        )
    if place is not None and (key_document_ids is None or place.dim() > 0):
        raise ValueError(
            "document_attention: expected a place without dimensions beside key_document_ids, got a place of "
            f"the shape {tuple(place.shape)}{' alone' if key_document_ids is None else ''}"
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise TypeError(
            f"document_attention: expected one dtype of floats, got {query.dtype}, {key.dtype} and "
            f"{value.dtype}"
        )
    for name, each in (
        ("document_ids", document_ids),
        ("key_document_ids", key_document_ids),
        ("place", place),
    ):
        if each is None:
            continue
        if each.device != query.device:
            raise ValueError(
                f"document_attention: expected {name} on {query.device}, as the query, got {each.device}"
            )
        if each.is_floating_point() or each.is_complex() or each.dtype is torch.bool:
            raise TypeError(f"document_attention: expected integer {name}, got {each.dtype}")


def default_scale(features: int) -> float:
    """Of scores, where nobody gives another one: 1 / sqrt(E)."""
    return 1 / math.sqrt(features)


LEAST_LENGTH = 1024
"""Keys of the kernels on a TPU, at least. Shorter attention has its scores in memory."""
BLOCKS = (1024, 512)
"""Sizes of a kernel's blocks of queries, and of keys, the best first. One of them divides a padded length."""


def padded_length(length: int) -> int:
    """Queries or keys that a kernel on a TPU computes, for so many that there are."""
    return math.ceil(length / BLOCKS[-1]) * BLOCKS[-1]


def is_kernel_on_tpu(
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    dtype: str,
    bias: tuple[Sequence[int], str] | None,
) -> bool:
    """Whether attention of these shapes has no scores in memory on a TPU: that of long sequences in bfloat16,
    which no mask of pairs limits. `bias`: shape and dtype of a mask; integers are documents. Lengths are
    padded; a few queries alone, such as a token of generated text, are not worth it.
    """
    if bias is not None and "int" not in bias[1]:
        return False
    return (
        dtype.endswith("bfloat16")
        and tuple(key)[:3] == tuple(value)[:3]
        and key[2] >= LEAST_LENGTH
        and padded_length(query[2]) < 2 * query[2]
    )


LENGTH_TOGETHER = 1024
"""Attention up to this length is computed at once, whatever the batch: blocks would be slower."""

MOST_TOGETHER = 2**26
"""Longer attention is computed at once, too, if it has at most this many scores (256 MiB in float32)."""

MOST_OF_BLOCK = 2**24
"""Otherwise it is computed in blocks of this many scores of one sequence, or of 128 queries of all its heads
if those have more. By a v6e's compiler (bfloat16, a mask of pairs, with gradients) one sequence of 8,192
with 8 heads takes 0.10 GB in place of 2.15 GB, and 5 % less time; 8 sequences of 2,048 with 12 heads take
0.10 GB in place of 1.61 GB, and 8 % more time.
"""

_ROWS = 128
"""Queries of a block are a multiple of this, so that they fill a TPU's matrix unit."""


def block_of_scores(batch: int, heads: int, queries: int, keys: int) -> tuple[int, int]:
    """How many sequences, and how many queries of each, have their scores in memory at a time, where neither
    a kernel nor blocks of keys compute attention.
    """
    if queries * keys <= LENGTH_TOGETHER**2 or batch * heads * queries * keys <= MOST_TOGETHER:
        return batch, queries
    most = max(MOST_OF_BLOCK // (heads * keys) // _ROWS, 1) * _ROWS
    count = math.ceil(queries / most)
    for each in range(count, 2 * count):
        if queries % (each * _ROWS) == 0:
            return 1, queries // each
    return 1, min(math.ceil(queries / count / _ROWS) * _ROWS, queries)
