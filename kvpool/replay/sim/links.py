"""The network: every node sends and receives at one rate, in the order in which transfers were asked for.

A transfer of several sources begins at each of them when it has sent what was asked for before, and ends when the last part has come and
the receiver could take in all of it. What is under way isn't slowed by what comes later.
"""

from collections.abc import Mapping


class Links:
    """The links of `nodes` nodes; bytes a second, times in seconds."""

    def __init__(self, nodes: int, rate: float) -> None:
        self._rate = rate
        self._sends_until = [0.0] * nodes
        self._takes_until = [0.0] * nodes

    def transfer(self, parts: Mapping[int, float], target: int, now: float) -> float:
        """Send `parts` (source: bytes) to `target`; when all is there."""
        end, total = now, 0.0
        for source, size in parts.items():
            if source == target or size <= 0:
                continue
            sent = max(now, self._sends_until[source]) + size / self._rate
            self._sends_until[source] = sent
            end = max(end, sent)
            total += size
        if total:
            taken = max(now, self._takes_until[target]) + total / self._rate
            self._takes_until[target] = taken
            end = max(end, taken)
        return end

    def backlog_s(self, target: int, now: float) -> float:
        """How long `target` is still busy receiving."""
        return max(0.0, self._takes_until[target] - now)
