"""`document_attention`: causal attention within documents, without a mask of all pairs of tokens.

And the rule that says which attention is a kernel on a TPU. Nothing here needs JAX.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad


def document_attention(
    query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor, *, scale: float | None = None
) -> Tensor:
    """`scaled_dot_product_attention` of tokens that see themselves and the earlier ones of their document.

    `query` is (B, H, S, E), `key` and `value` are (B, K, S, E), where K divides H: H / K heads in a row share
    keys. All are of one dtype of floats; under autocast they are cast as there. `document_ids` (B or 1, S)
    are integers, of which a TPU looks at the lowest 32 bits. The result is (B, H, S, E). `scale`: of the
    scores, 1 / sqrt(E) unless given.

    A mask would hold S x S truth values for each sequence. This makes one on other devices, in torch.func's
    transforms and in forward differentiation only. Raises ValueError or TypeError for what does not fit.
    """
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (
            each if each.dtype is torch.float64 else each.to(dtype) for each in (query, key, value)
        )
    _check(query, key, value, document_ids)
    if kind != "tpu" or _is_transformed():
        seen = torch.ones(2 * (query.shape[2],), dtype=torch.bool, device=query.device).tril()
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
        return F.scaled_dot_product_attention(
            query, key, value, seen[:, None], scale=scale, enable_gqa=key.shape[1] < query.shape[1]
        )
    has_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    # Where a mask would stand, the operation takes integers for documents.
    output: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, document_ids[:, None, None, :], has_gradient, 0.0, True, scale=scale
    )[0]
    return output


def _is_transformed() -> bool:
    """Whether derivatives are asked for that the operation lacks: forward ones, and those of torch.func."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def _check(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor) -> None:
    shapes = ", ".join(str(tuple(each.shape)) for each in (query, key, value, document_ids))
    fits = (
        query.dim() == key.dim() == 4
        and key.shape == value.shape
        and query.shape[0] == key.shape[0]
        and query.shape[2:] == key.shape[2:]
        and key.shape[1] > 0
        and query.shape[1] % key.shape[1] == 0
        and query.shape[3] > 0
        and document_ids.dim() == 2
        and document_ids.shape[0] in (1, query.shape[0])
        and document_ids.shape[1] == query.shape[2]
    )
    if not fits:
        raise ValueError(
            "document_attention: expected (B, H, S, E), (B, K, S, E), (B, K, S, E) and (B, S), where K "
            f"divides H; got {shapes}"
        )
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise TypeError(
            f"document_attention: expected one dtype of floats, got {query.dtype}, {key.dtype} and "
            f"{value.dtype}"
        )
    if document_ids.is_floating_point() or document_ids.is_complex() or document_ids.dtype is torch.bool:
        raise TypeError(f"document_attention: expected integer document_ids, got {document_ids.dtype}")


LEAST_LENGTH = 1024
"""Queries and keys of the kernels on a TPU, at least. Shorter attention has its scores in memory."""
BLOCKS = (1024, 512)
"""Sizes of a kernel's blocks of queries, and of keys, the best first. One of them divides a length."""


def is_kernel_on_tpu(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], dtype: str, bias: str | None
) -> bool:
    """Whether attention of these shapes has no scores in memory on a TPU: that of long sequences in bfloat16,
    which no mask of pairs limits. `bias`: the dtype of a mask; integers are documents.
    """
    lengths = query[2], key[2]
    return (
        dtype.endswith("bfloat16")
        and (bias is None or "int" in bias)
        and tuple(key) == tuple(value)
        and min(lengths) >= LEAST_LENGTH
        and all(length % BLOCKS[-1] == 0 for length in lengths)
    )
