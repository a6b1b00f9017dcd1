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

_DURATION_PART = r"(\d+(?:\.\d+)?)\s*(us|µs|ms|s|m|h|d)"
_DURATION = re.compile(rf"^\s*(?:{_DURATION_PART}\s*)+$")
_DURATIONS = {"us": US, "µs": US, "ms": MS, "s": SECOND, "m": 60 * SECOND, "h": 3600 * SECOND, "d": 86_400 * SECOND}


def parse_size(text: str) -> int:
    """Bytes in `text`, such as `512MiB`, `2g` or `1000`. Raises `ConfigError` otherwise."""
    match = _SIZE.match(text)
    factor = _SIZES.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise ConfigError(f"not a size: {text!r}; write for example 512MiB or 2GiB")
    return int(float(match.group(1)) * factor)


def parse_duration(text: str) -> int:
    """Nanoseconds in `text`, such as `30m`, `1.5s`, `250ms` or `1h30m`; a number without a unit is none. Raises `ConfigError`."""
    if not _DURATION.match(text):
        raise ConfigError(f"not a duration: {text!r}; write for example 30m, 1.5s, 2h or 1h30m (units {', '.join(_DURATIONS)})")
    return sum(round(float(count) * _DURATIONS[unit]) for count, unit in re.findall(_DURATION_PART, text))


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


def format_age(duration_ns: int) -> str:
    """How long ago, or how long still, in the two largest units: `3 d 4 h`, `2 h 5 m`, `1 m 30 s`, `12 s`, `250 ms`."""
    if duration_ns < SECOND:
        return f"{duration_ns // MS} ms"
    seconds = duration_ns // SECOND
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s")]
    largest = next(index for index, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[largest : largest + 2] if count)
