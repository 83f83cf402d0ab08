"""What a chip can do at most: the denominator of MFU."""

PEAK_BF16_FLOPS: dict[str, float] = {
    # Google Cloud's TPU documentation, a page a version ("Peak compute per chip, bf16"). XLA names a chip in
    # one way or the other, by its version.
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    # NVIDIA's data sheets of A100, H100 and H200, bfloat16 Tensor Core without sparsity (where a sheet gives
    # the figure with sparsity, half of it).
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
}
"""FLOP/s of dense bfloat16 products by the device's whole name, as XLA gives it."""


def peak_flops(chip: str | None) -> float | None:
    """FLOP/s of the chip of that name; None where it is not known.

    Only whole names count: a guess by what a name resembles gives an MFU that is wrong and looks right.
    """
    return None if chip is None else PEAK_BF16_FLOPS.get(chip)
