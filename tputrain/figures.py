"""Figures as people read them: `1,234`, `0.00123`, `206.9 MB`, `13 ms`, `7.70 GiB`, `50.7%`."""

import math
import time


def plain(value: float) -> str:
    """Four digits that count, thousands apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e7 or abs(value) < 1e-3:
        return scientific(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def scientific(value: float) -> str:
    """`3e-4`, `1.5e-4`."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}" if int(exponent) else mantissa


def percent(value: float) -> str:
    """A share of 1, such as an MFU."""
    return f"{value:.1%}"


def share(value: float) -> str:
    """A share of 1 in percent, with digits enough for an axis."""
    return f"{plain(100 * value)} %"


def seconds_text(value: float) -> str:
    """From microseconds to hours, in the unit that fits."""
    if value == 0:
        return "0 s"
    for size, unit in ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms")):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value / 1e-6)} µs"


def bytes_text(value: float) -> str:
    """In decimal units, as disks and chips are sold."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:.0f} B"


def memory_text(num_bytes: float) -> str:
    """In KiB, MiB or GiB, as a device's memory is counted."""
    size = num_bytes / 2**30
    if size < 0.1 / 2**10:
        return f"{num_bytes / 2**10:.1f} KiB"
    if size < 0.1:
        return f"{num_bytes / 2**20:.1f} MiB"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:,.{digits}f} GiB"


def moment(seconds: float) -> str:
    """Local time of `seconds` since 1970, `2026-01-31 14:05:09`; a dash where nothing is known."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "–"
    except (OverflowError, ValueError, OSError):
        return "–"  # no calendar has that year


def _three_digits(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{2 - math.floor(math.log10(abs(value)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
