"""The sizes that programs are padded to."""

from __future__ import annotations

SMALLEST_BUCKET = 4


def bucket(size: int) -> int:
    """The least of 4, 6, 8, 12, 16, 24, ... (powers of two and one and a half of them) that is not below."""
    power = max(SMALLEST_BUCKET, 1 << (size - 1).bit_length())
    return power * 3 // 4 if size <= power * 3 // 4 and power > SMALLEST_BUCKET else power
