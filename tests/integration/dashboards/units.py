"""Values as Grafana writes them, for the units that the dashboards use."""

from __future__ import annotations

from collections.abc import Sequence

_THOUSANDS = ("", "K", "M", "G", "T", "P")
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s")
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PLAIN = {"none": "", "cps": " /s", "reqps": " /s"}


def written(value: float, unit: str, decimals: int | None = None) -> str:
    """Returns a value in its unit, with three digits or so, or without those behind the point."""
    if decimals == 0:
        value = round(value)
    if unit == "s":
        return _time(value)
    if unit == "bytes":
        return _scaled(value, 1024.0, _BINARY, " ")
    if unit == "Bps":
        return _scaled(value, 1000.0, _DECIMAL, " ")
    if unit == "short":
        return _scaled(value, 1000.0, _THOUSANDS, "")
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "sci":
        return f"{value:.2e}"
    return f"{_digits(value)}{_PLAIN[unit]}"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def _time(value: float) -> str:
    for size, name in _TIMES:
        if abs(value) >= size:
            return f"{_digits(value / size)} {name}"
    return "0 s" if value == 0 else f"{value / 1e-6:.2g} µs"


def _scaled(value: float, base: float, names: Sequence[str], gap: str) -> str:
    place = 0
    while abs(value) >= base and place + 1 < len(names):
        value /= base
        place += 1
    return f"{_digits(value)}{gap}{names[place]}".rstrip()
