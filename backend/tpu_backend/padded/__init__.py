"""Segments that come again with another size, served by one program that is padded (docs/execution.md)."""
