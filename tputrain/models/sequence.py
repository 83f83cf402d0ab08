"""A sequence of which each of several ranks has a part: attention is of the part's queries over all keys.

A part is two stretches of equal length, one from the front of the sequence and one from its end: of 4 ranks
the first one has stretches 0 and 7, the second one 1 and 6. So causal attention is equal work for all ranks
(zigzag; in PyTorch head-tail load balancing).
A rank's places in the sequence are data on the device, so that all ranks run one program.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tputrain import device as devices
from tputrain.errors import UserError


class SplitSequence:
    """The ranks that share a sequence, each a part of equal length, in the order of their first stretches."""

    def __init__(self, group: Any, size: int, rank: int, device: torch.device):
        self.group, self.size = group, size
        self.rank = torch.tensor(rank, device=device)
        self.num_gathered = 0
        """Tensors that attention has asked the whole of."""

    def starts(self, length: int) -> list[Tensor]:
        """Where the two stretches of this rank's `length` tokens start (int64, without dimensions)."""
        return [number * half_of(length) for number in stretches_of(self.rank, self.size)]


def half_of(length: int) -> int:
    """Tokens of each stretch of a rank's part. Raises UserError where they are not equally many."""
    if length % 2:
        raise UserError(
            f"parallel.context: a model has {length} tokens of a rank's part of a sequence: expected an even "
            "number, as the part is two stretches of equal length"
        )
    return length // 2


def stretches_of(rank: Any, size: int) -> tuple[Any, Any]:
    """Which of the `2 * size` stretches of a sequence a rank has, for an int or a tensor."""
    return rank, 2 * size - 1 - rank


_split: SplitSequence | None = None


def is_split() -> bool:
    """Whether this rank has a part of each sequence."""
    return _split is not None


def places(length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the tokens that this rank has (int64, (length,)), and of the whole sequence, their places in it."""
    if _split is None:
        own = torch.arange(length, device=device)
        return own, own
    stretch = torch.arange(half_of(length), device=device)
    own = torch.cat([start + stretch for start in _split.starts(length)])
    return own, torch.arange(length * _split.size, device=device)


def whole(part: Tensor, dim: int) -> Tensor:
    """What the ranks that share a sequence have together, along `dim` (from 0), in the order of the sequence.
    Gradients flow back to each part.
    """
    if _split is None:
        return part
    from torch.distributed import _functional_collectives as collectives

    _split.num_gathered += 1
    half_of(part.shape[dim])
    gathered = collectives.wait_tensor(collectives.all_gather_single(part.contiguous(), 0, _split.group))
    stretches = [each for own in gathered.chunk(_split.size) for each in own.chunk(2, dim)]
    return torch.cat([*stretches[::2], *reversed(stretches[1::2])], dim)


def attend_to_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Tensor | None,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Causal attention of this rank's queries (B, H, S, D) to the keys (B, K, S, D) and values (B, K, S, E)
    of all ranks.

    `documents` (B, S + T): those of this rank's tokens, then of the whole sequence's. None: all are of one.
    `window`: how many tokens each one sees at most, itself included. No pairs of tokens are in memory where
    the device has a kernel; the places of this rank's queries are data.
    """
    assert _split is not None, "expected a sequence that ranks share"
    length, key, value = query.shape[2], whole(key, 2), whole(value, 2)
    if documents is None:
        documents = torch.zeros(1, length + key.shape[2], dtype=torch.int64, device=query.device)
    attend = devices.document_attention()
    mixed = [
        attend(
            queries,
            key,
            value,
            own,
            key_document_ids=documents[:, length:],
            place=start,
            scale=scale,
            window=window,
        )
        for queries, own, start in zip(
            query.chunk(2, 2), documents[:, :length].chunk(2, 1), _split.starts(length), strict=True
        )
    ]
    return torch.cat(mixed, 2)


@contextmanager
def sequence_split(split: SplitSequence | None) -> Iterator[None]:
    """In here models have parts of sequences; PyTorch's `scaled_dot_product_attention` knows of it, too.

    Raises UserError where a model has run whose attention does not.
    """
    global _split
    if split is None:
        yield
        return
    attend, before = F.scaled_dot_product_attention, split.num_gathered
    _split, F.scaled_dot_product_attention = split, _Attention(attend)  # type: ignore[assignment]
    try:
        yield
    finally:
        _split, F.scaled_dot_product_attention = None, attend
    if split.num_gathered == before:
        raise UserError(
            f"parallel.context={split.size}: the model's attention sees only the part of a sequence that its "
            "rank has: expected our Llama, or attention by torch.nn.functional.scaled_dot_product_attention, "
            "called by that name"
        )


class _Attention:
    """`scaled_dot_product_attention` of queries on this rank over the keys and values of all."""

    def __init__(self, attend: Any):
        self._attend = attend

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if is_causal and attn_mask is None and dropout_p == 0 and _has_kernel(query, key, value, **options):
            return attend_to_whole(query, key, value, None, options.get("scale"))
        key, value = whole(key, -2 + key.dim()), whole(value, -2 + value.dim())
        if attn_mask is not None and (is_causal or attn_mask.shape[-1] != key.shape[-2]):
            raise UserError(
                f"parallel.context: attention was given a mask of shape {tuple(attn_mask.shape)}"
                f"{' beside is_causal' if is_causal else ''}: expected is_causal, no mask, or a mask of "
                f"this rank's rows and all {key.shape[-2]} columns of the sequence "
                "(tputrain.models.sequence.places)"
            )
        if is_causal:
            rows, columns = places(query.shape[-2], query.device)
            attn_mask = rows[:, None] >= columns[None, :]
        return self._attend(query, key, value, attn_mask, dropout_p, **options)


def _has_kernel(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None = None, enable_gqa: bool = False
) -> bool:
    """Whether the device computes causal attention of these without pairs, or takes them at least."""
    return (
        query.device.type == "tpu"
        and query.dim() == key.dim() == 4
        and key.shape[:3] == value.shape[:3]
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0))
    )
