"""Bytes, seconds and counts as people read them."""

from __future__ import annotations

__all__ = ["format_bytes", "format_cost", "format_count", "format_rate", "format_seconds"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")


def _scaled(value: float, base: int, units: tuple[str, ...]) -> tuple[float, str]:
    size = float(value)
    unit = units[0]
    for unit in units:
        if abs(size) < base * 0.9995:
            break
        if unit != units[-1]:
            size /= base
    return size, unit


def format_bytes(value: float) -> str:
    """``1536`` as ``1.50 KiB``; whole bytes below one KiB."""
    size, unit = _scaled(value, 1024, _BINARY)
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


def format_count(value: float, unit: str = "") -> str:
    """``81954092640`` as ``81.95 G``, with the unit behind it."""
    size, prefix = _scaled(value, 1000, _DECIMAL)
    text = f"{size:.0f}" if prefix == "" and size == int(size) else f"{size:.2f}"
    return f"{text} {prefix}{unit}".rstrip()


def format_rate(value: float, unit: str) -> str:
    """A count per second: ``3.72 TFLOP/s``."""
    return f"{format_count(value, unit)}/s"


def format_seconds(value: float) -> str:
    """``0.0227`` as ``22.700 ms``."""
    size = abs(value)
    for limit, scale, unit in ((1e-6, 1e9, "ns"), (1e-3, 1e6, "µs"), (1.0, 1e3, "ms")):
        if 0 < size < limit * 0.9999995:  # what would be printed as 1000.000 belongs to the next unit
            return f"{value * scale:.3f} {unit}"
    return f"{value:.3f} s"


def format_cost(value: float, origin: str) -> str:
    """What operators take: seconds, but ``267 units`` where the costs are unit costs, which are no times."""
    if origin != "unit":
        return format_seconds(value)
    digits = f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{digits} {'unit' if digits == '1' else 'units'}"
