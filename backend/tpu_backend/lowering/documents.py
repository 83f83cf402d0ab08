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


def documents_of(bias: jax.Array | None, queries: int, keys: int) -> Documents | None:
    """What `bias` says, if it is of integers, for so many queries and keys.

    Its shape is (B or 1, 1, 1, N). N = S: the documents of the keys, who are the queries. N = L + S: those of
    the queries, then those of the keys. N = L + S + 1: the place of the first query follows.
    """
    if bias is None or not jnp.issubdtype(bias.dtype, jnp.integer):
        return None
    ids = bias.reshape(bias.shape[0], -1)
    if ids.shape[1] == keys:
        return Documents(ids, ids, None)
    place = ids[0, -1] if ids.shape[1] > queries + keys else None
    return Documents(ids[:, :queries], ids[:, queries : queries + keys], place)
