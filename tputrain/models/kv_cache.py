"""Keys and values of the tokens so far: text grows by a token, and its beginning is not computed anew."""

import torch
from torch import Tensor


class LayerCache:
    """Holds the keys and the values of one layer, each (B, K, length, D). They are written in place."""

    def __init__(self, length: int):
        self.length = length
        self._held: tuple[Tensor, Tensor] | None = None

    def extended(self, places: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write these keys and values (B, K, S, D) at `places` (int64, (S,)), and return all that are held.

        Places behind the last token hold no text: the caller's mask must rule them out.
        """
        if self._held is None:
            size = (*key.shape[:2], self.length, key.shape[3])
            self._held = key.new_zeros(size), value.new_zeros(size)
        keys, values = self._held
        return keys.index_copy_(2, places, key), values.index_copy_(2, places, value)


class KeyValueCache:
    """Holds the keys and values of all layers, for texts of up to `length` tokens.

    The buffers keep their shape: one program serves every further token.
    """

    def __init__(self, length: int, num_layers: int):
        self.length = length
        self.layers = [LayerCache(length) for _ in range(num_layers)]

    def places(self, device: torch.device) -> Tensor:
        """The places of all held tokens in the text: int64, (length,)."""
        return torch.arange(self.length, device=device)
