"""What a mask of integers says of attention: of which document each query and each key is."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Documents(NamedTuple):
    """A query looks at keys of its own document. B or 1 sequences of L queries and S keys."""

    queries: jax.Array
    """(B or 1, L)."""
    keys: jax.Array
    """(B or 1, S)."""
    place: jax.Array | None
    """Of the first query among the keys, for a causal mask; None: 0, which a program may rely on."""
    window: int | None = None
    """How many keys of a causal mask a query sees, its own place included, whatever their documents."""


def documents_of(bias: jax.Array | None, queries: int, keys: int) -> Documents | None:
    """What `bias` says, if it is of integers, for so many queries and keys.

    Its shape is (B or 1, 1, W, N). N = S: the documents of the keys, who are the queries. N = L + S: those of
    the queries, then those of the keys. N = L + S + 1: the place of the first query follows. The W rows are
    one, seen often: W > 1 is the window.
    """
    if bias is None or not jnp.issubdtype(bias.dtype, jnp.integer):
        return None
    ids = bias[:, 0, 0]
    window = bias.shape[2] if bias.shape[2] > 1 else None
    if ids.shape[1] == keys:
        return Documents(ids, ids, None, window)
    place = ids[0, -1] if ids.shape[1] > queries + keys else None
    return Documents(ids[:, :queries], ids[:, queries : queries + keys], place, window)
