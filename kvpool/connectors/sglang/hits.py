"""How far a prefix can be restored when several pools of an engine have to have their part of it. Pure.

SGLang asks for a span of pages and takes a prefix of it. A pool says by its *policy* which prefixes it can serve:

    all_pages        those of which it has every page
    trailing_pages   those of which it has the last n pages (states and windows only cover the end), so there may be longer ones behind
                     one that can't be served
"""

from collections.abc import Sequence

from kvpool.errors import ConfigError


def leading(present: Sequence[bool]) -> int:
    """How many true items `present` starts with."""
    return next((i for i, there in enumerate(present) if not there), len(present))


def servable(policy: str, present: Sequence[bool], trailing: int) -> list[int]:
    """The lengths of prefixes of the span that a pool can serve, ascending; `present`: which pages it has. Raises `ConfigError`."""
    if policy == "all_pages":
        return list(range(1, leading(present) + 1))
    if policy == "trailing_pages":
        window = max(1, trailing)
        return [n for n in range(1, len(present) + 1) if all(present[max(0, n - window) : n])]
    raise ConfigError(f"pool hit policy {policy!r} is not supported; what is: all_pages, trailing_pages")
