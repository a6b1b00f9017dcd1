"""Sizes and durations: constants, parsing of `1GiB` and `1.5s`, printing."""

import re

from kvpool.errors import ConfigError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

US = 1_000
MS = 1_000_000
SECOND = 1_000_000_000

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*$")
_SIZES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": GIB * KIB, "tib": GIB * KIB, "tb": 1000**4,
}  # fmt: skip


def parse_size(text: str) -> int:
    """Bytes in `text`, such as `512MiB`, `2g` or `1000`. Raises `ConfigError` otherwise."""
    match = _SIZE.match(text)
    factor = _SIZES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"not a size: {text!r}; write for example 512MiB or 2GiB")
    return int(float(match.group(1)) * factor)


def format_size(count: int) -> str:
    """`count` bytes for people: `1.50 GiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_ns(duration_ns: int) -> str:
    """A duration for people: `12.3 ms`, `4.56 s`."""
    if duration_ns >= SECOND:
        return f"{duration_ns / SECOND:.2f} s"
    if duration_ns >= MS:
        return f"{duration_ns / MS:.1f} ms"
    return f"{duration_ns / US:.0f} µs"
