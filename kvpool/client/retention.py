"""How long which part of a prompt is worth keeping: a priority per range of tokens, with a duration (TensorRT-LLM's retention config)."""

from collections.abc import Sequence
from typing import NamedTuple

from kvpool.errors import ConfigError
from kvpool.request.pool import DEFAULT_PRIORITY
from kvpool.units import MS


class Retention(NamedTuple):
    """Tokens `start`..`end` (exclusive; None: to the end) have `priority` 0..100 for `duration_ns` from their commit (0: for ever)."""

    start: int
    end: int | None
    priority: int
    duration_ns: int = 0


def check_retention(ranges: Sequence[Retention]) -> None:
    """Raise `ConfigError` for ranges that make no sense."""
    for one in ranges:
        if one.start < 0 or (one.end is not None and one.end <= one.start) or not 0 <= one.priority <= 100 or one.duration_ns < 0:
            raise ConfigError(f"a retention needs 0 <= start < end, a priority of 0 to 100 and a duration that isn't negative; got {one}")


def priority_of(ranges: Sequence[Retention], start: int, end: int) -> tuple[int, int]:
    """(priority, milliseconds) of the block of tokens `start`..`end`: the highest of the ranges it touches, the default without any."""
    touching = [one for one in ranges if one.start < end and (one.end is None or start < one.end)]
    if not touching:
        return DEFAULT_PRIORITY, 0
    best = max(touching, key=lambda one: (one.priority, one.duration_ns or float("inf")))
    return best.priority, -(-best.duration_ns // MS)
