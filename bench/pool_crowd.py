"""Many clients at once, beside two copies of memory at once: who gets how much, and how evenly."""

import statistics
import time
from collections.abc import Sequence

from bench.peers.turns import COPIED
from bench.pool_turns import Contestant, Turn, take_turn
from bench.report import spread

CLIENTS = 8
CASE = "get_32x1m"
_WINDOW_S = 1.0
_LEAD_S = 0.5


def measure(clients: Sequence[Contestant], rounds: int) -> dict[str, object]:
    """All `clients` read for a second, then two of them copy the same blocks to the same rows for a second, `rounds` times.

    A client's rate is what it read by how long its reads took, an aggregate is the sum of the rates. p99 and p50 are over all reads
    of a round.
    """
    nbytes = clients[0].cases[CASE]
    ratios, evenness, rates, p50s = [], [], [], []
    for _ in range(rounds):
        reads, copies = _window(clients, CASE), _window(clients[:2], COPIED)
        rates.append(_rate(reads, nbytes))
        ratios.append(rates[-1] / _rate(copies, nbytes))
        seconds = sorted(second for turn in reads for second in turn.seconds)
        p50s.append(statistics.median(seconds))
        evenness.append(seconds[int(len(seconds) * 0.99)] / p50s[-1])
    return {
        "clients8_gbps": spread([rate / 1e9 for rate in rates]),
        "clients8_over_2memcpy": spread(ratios),
        "clients8_p50_ms": spread([p50 * 1e3 for p50 in p50s]),
        "clients8_p99_over_p50": spread(evenness),
    }


def _window(contestants: Sequence[Contestant], case: str) -> list[Turn]:
    start = time.monotonic() + _LEAD_S
    return list(take_turn(contestants, {"case": case, "start": start, "stop": start + _WINDOW_S}))


def _rate(turns: Sequence[Turn], nbytes: int) -> float:
    return sum(len(turn.seconds) * nbytes / sum(turn.seconds) for turn in turns)
