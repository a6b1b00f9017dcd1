"""What every bench shares: rounds taken in turn, median with range, a table, and one JSON object as the last line.

Theory. A machine drifts while it measures, so the things compared take turns round by round instead of one after the other,
and a figure is the median of its rounds beside the lowest and the highest.
"""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median and range of some rounds, all in one unit."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


def spread(values: Sequence[float]) -> Spread:
    """Median, lowest and highest of `values` (at least one)."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def time_in_turns(cases: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, list[float]]:
    """Seconds of each case in each round; one round runs every case once. One round before them warms up, uncounted."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for counted in [False] + [True] * rounds:
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            took = time.perf_counter() - start
            if counted:
                seconds[name].append(took)
    return seconds


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Rows under headers, columns aligned: the first to the left, the others to the right."""
    lines = [[str(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


def print_json(result: Mapping[str, object]) -> None:
    """`result` on one line; a `Spread` becomes an object of its three numbers. Call it last."""
    print(json.dumps(result, default=_plain, sort_keys=True), flush=True)


def _plain(value: object) -> object:
    if isinstance(value, Spread):
        return asdict(value)
    raise TypeError(f"no JSON for {type(value).__name__}")
