"""The numbers that a run is followed and judged by."""
