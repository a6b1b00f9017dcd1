"""How many prompt tokens ride in the next pass of a worker that makes answers besides. Pure.

Theory. What is promised of the time between an answer's tokens is its mean, the target. An answer may be ahead of it::

    ahead = target x tokens since it began - time since it began

A pass gives each answer one token. So none is behind the target after the next pass if it wasn't before and that pass takes no longer
than target + the least that any is ahead. That lets prompts in quickly where steps have been short for a while; a single gap is at most
`LONGEST` targets all the same, so that nobody's text stands still. Where answers are behind already, because they began in the middle of
a pass or there are more of them than the target allows, prompts still get a `PARTS`th of a chunk in each pass: they are never starved.

The engine's scheduler and the simulated decode nodes both take it from here.
"""

from collections.abc import Callable

LONGEST = 2.0
"""Targets that one pass may take, however far ahead all answers are."""
PARTS = 16
"""Prompts are cut at multiples of a chunk's 16th."""


def longest(target: float, ahead: float) -> float:
    """How long the next pass may take, in the unit of both: the least that any answer is `ahead` (negative: behind) of `target`."""
    return min(target + ahead, LONGEST * target)


def part(chunk_tokens: int) -> int:
    """The tokens by which a prompt's share of a pass changes: a 16th of a chunk, at least one."""
    return max(1, chunk_tokens // PARTS)


def riding(limit: float, chunk_tokens: int, takes: Callable[[int], float]) -> int:
    """Prompt tokens of the next pass: a chunk, or as many parts of it as let the pass take at most `limit`, but at least one.

    `takes`: how long a pass with so many takes, answers included; it doesn't fall with their number.
    """
    size = part(chunk_tokens)
    low, high = 1, -(-chunk_tokens // size)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(min(chunk_tokens, middle * size)) <= limit else (low, middle - 1)
    return min(chunk_tokens, low * size)
