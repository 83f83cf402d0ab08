"""Which software a run was made with."""

import platform
from functools import cache
from importlib import metadata

__version__ = "0.1.0"
_PACKAGES = ("torch", "jax", "jaxlib", "numpy", "safetensors", "tokenizers")


def versions() -> dict[str, str]:
    """Versions of Python, tputrain and the packages that results depend on, those that are installed."""
    installed = {name: _installed(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "tputrain": __version__,
        **{name: version for name, version in installed.items() if version is not None},
    }


@cache  # each look reads a file of the package's, and every checkpoint asks
def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
