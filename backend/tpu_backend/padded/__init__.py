"""Segments that come again with another size, served by one program that is padded (docs/execution.md)."""

# The runtime imports these modules. It comes first, whoever asks for one of them.
import tpu_backend.runtime  # noqa: F401
