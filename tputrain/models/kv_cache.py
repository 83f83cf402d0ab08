"""Keys and values of the tokens so far: text grows by a token, and its beginning is not computed anew."""

import torch
from torch import Tensor


class LayerCache:
    """Of one layer: keys and values, each (B, K, length, D), which are written in place."""

    def __init__(self, length: int):
        self.length = length
        self._held: tuple[Tensor, Tensor] | None = None

    def extended(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, with these (B, K, S, D) at `places` (int64, (S,)).

        What is behind the last token is not of the text: a token must not look there.
        """
        if self._held is None:
            size = (*key.shape[:2], self.length, key.shape[3])
            self._held = key.new_zeros(size), value.new_zeros(size)
        keys, values = self._held
        return keys.index_copy_(2, places, key), values.index_copy_(2, places, value)


class KeyValueCache:
    """Of all layers, for texts of up to `length` tokens.

    Its buffers keep their shape: one program serves every further token.
    """

    def __init__(self, length: int, num_layers: int):
        self.length = length
        self.layers = [LayerCache(length) for _ in range(num_layers)]

    def places(self, device: torch.device) -> Tensor:
        """Those of everything that is held: int64, (length,)."""
        return torch.arange(self.length, device=device)
