"""Which software a run was made with."""

import platform
from importlib import metadata

import tputrain

_PACKAGES = ("torch", "jax", "jaxlib", "numpy", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python, tputrain and the packages that results depend on, those that are installed."""
    found = {"python": platform.python_version(), "tputrain": tputrain.__version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
