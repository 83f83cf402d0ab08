"""The ways in which recorded operations are run: the eager modes, and fused mode in parts."""

from typing import Any

import torch

WAYS: dict[str, dict[str, Any]] = {
    "debug": {"mode": "debug"},
    "strict": {"mode": "strict"},
    "fused": {"mode": "fused"},
    "parts": {"mode": "fused", "parts": "always"},
}


def run_as(way: str) -> Any:
    """The context in which they are run so."""
    return torch.tpu.eager_mode(**WAYS[way])
