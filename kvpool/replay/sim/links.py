"""The network: every node sends and receives at one rate.

There are two kinds of transfers: *reads*, for which somebody waits before he can compute, and the rest (hand-offs, writes to owners). Of
one kind they go one after the other; a read that meets the other kind under way gets half of the link, as connections that share one
do. A transfer of several sources ends when the last part has come and the receiver could take in all of it. What is under way isn't
slowed by what comes later.
"""

from collections.abc import Mapping


class _Side:
    """One direction of all nodes: until when each is busy with reads, and with the rest."""

    def __init__(self, nodes: int, rate: float) -> None:
        self._rate = rate
        self.reads = [0.0] * nodes
        self._rest = [0.0] * nodes

    def take(self, node: int, size: float, now: float, *, read: bool) -> float:
        """When `size` bytes are through."""
        if not read:
            self._rest[node] = max(now, self._rest[node], self.reads[node]) + size / self._rate
            return self._rest[node]
        begin = max(now, self.reads[node])
        shared = min(max(0.0, self._rest[node] - begin), 2.0 * size / self._rate)  # as long as both are there, half speed
        self.reads[node] = begin + size / self._rate + shared / 2.0
        return self.reads[node]


class Links:
    """The links of `nodes` nodes; bytes a second, times in seconds."""

    def __init__(self, nodes: int, rate: float) -> None:
        self._sends = _Side(nodes, rate)
        self._takes = _Side(nodes, rate)

    def transfer(self, parts: Mapping[int, float], target: int, now: float, *, read: bool) -> float:
        """Send `parts` (source: bytes) to `target`; when all is there."""
        end, total = now, 0.0
        for source, size in parts.items():
            if source != target and size > 0:
                end = max(end, self._sends.take(source, size, now, read=read))
                total += size
        return max(end, self._takes.take(target, total, now, read=read)) if total else end

    def backlog_s(self, target: int, now: float) -> float:
        """How long `target` is still busy with reads."""
        return max(0.0, self._takes.reads[target] - now)
