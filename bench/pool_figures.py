"""From the turns of `bench.pool` to its figures: a median over the rounds beside the lowest and the highest, and ratios round by round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.peers.turns import COPIED
from bench.pool_turns import Turn
from bench.report import Spread, spread
from kvpool.units import GIB


@dataclass(frozen=True, slots=True)
class Results:
    """`turns[contestant, case]`: one turn a round, the rounds of all in the same order. `nbytes[case]` one operation moves."""

    turns: Mapping[tuple[str, str], Sequence[Turn]]
    nbytes: Mapping[str, int]
    idle_cores: Mapping[str, float] = field(default_factory=dict)
    """Of who serves each contestant, while nobody asks."""

    def has(self, name: str, case: str) -> bool:
        """Whether this was measured."""
        return (name, case) in self.turns

    def us(self, name: str, case: str) -> Spread:
        """The p50 of a round's operations, in microseconds."""
        return spread([turn.p50_s * 1e6 for turn in self.turns[name, case]])

    def gbps(self, name: str, case: str) -> Spread:
        """Bytes of an operation by its p50, in GB/s."""
        return spread([self.nbytes[case] / turn.p50_s / 1e9 for turn in self.turns[name, case]])

    def over(self, name: str, other: str, case: str, other_case: str = "") -> Spread:
        """How many times as fast as `other` in the same round, at the same case or another one."""
        pairs = zip(self.turns[name, case], self.turns[other, other_case or case], strict=True)
        return spread([yard.p50_s / turn.p50_s for turn, yard in pairs])

    def cpu_s_per_gib(self, name: str, case: str) -> Spread:
        """CPU seconds at the client and at who serves it, together."""
        turns = self.turns[name, case]
        return spread([(t.client_cpu_s + t.server_cpu_s) / (len(t.seconds) * self.nbytes[case] / GIB) for t in turns])


_US = ("get_64k", "get_1m", "put_64k", "probe512", "view_32")
_GBPS = ("get_32x1m", "put_32x1m")


def figures_of(results: Results, name: str) -> dict[str, object]:
    """All there is to say of one contestant."""
    found: dict[str, object] = {f"{case}_us": results.us(name, case) for case in _US if results.has(name, case)}
    for case in _GBPS:
        if results.has(name, case):
            found[f"{case}_gbps"] = results.gbps(name, case)
            for yard, key in (("memcpy", "memcpy"), ("raw tcp", "raw")):
                found[f"{case}_over_{key}"] = results.over(name, yard, case)
    if results.has(name, "get_32x1m"):
        found["cpu_s_per_gib"] = results.cpu_s_per_gib(name, "get_32x1m")
    if name in results.idle_cores:
        found["idle_cores"] = results.idle_cores[name]
    return found


_HEADLINES = {
    "shm_get_64k_us": ("kvpool shm", "get_64k"),
    "shm_get_64k_hashed_us": ("kvpool shm", "get_64k_hashed"),
    "shm_get_64k_us_checked": ("kvpool shm checked", "get_64k"),
    "shm_get_1m_us": ("kvpool shm", "get_1m"),
    "shm_get_1m_us_checked": ("kvpool shm checked", "get_1m"),
    "shm_put_64k_us": ("kvpool shm", "put_64k"),
    "view_32_us": ("kvpool shm", "view_32"),
    "probe512_us": ("kvpool shm", "probe512"),
    "probe512_hashed_us": ("kvpool shm", "probe512_hashed"),
    "probe512_tcp_us": ("kvpool tcp", "probe512"),
    "tcp_get_64k_us": ("kvpool tcp", "get_64k"),
    "tcp_get_1m_us": ("kvpool tcp", "get_1m"),
}
_RATIOS = {
    "shm_get_32x1m_over_memcpy": ("kvpool shm", "kvpool shm", "get_32x1m", COPIED),
    "shm_get_32x1m_over_memcpy_elsewhere": ("kvpool shm", "memcpy", "get_32x1m", "get_32x1m"),
    "shm_get_32x1m_over_memcpy_checked": ("kvpool shm checked", "kvpool shm checked", "get_32x1m", COPIED),
    "shm_put_32x1m_over_memcpy": ("kvpool shm", "memcpy", "put_32x1m", "put_32x1m"),
    "tcp_get_32x1m_over_raw": ("kvpool tcp", "raw tcp", "get_32x1m", "get_32x1m"),
    "tcp_get_32x1m_over_mooncake": ("kvpool tcp", "mooncake tcp", "get_32x1m", "get_32x1m"),
}


def headlines(results: Results, peers: Sequence[str]) -> dict[str, object]:
    """The figures that have goals, by the names that the goals use; those that were not measured are missing."""
    found: dict[str, object] = {key: results.us(*where) for key, where in _HEADLINES.items() if results.has(*where)}
    for key, (name, yard, case, yard_case) in _RATIOS.items():
        if results.has(name, case) and results.has(yard, yard_case):
            found[key] = results.over(name, yard, case, yard_case)
    shm = ("kvpool shm", "get_32x1m")
    if results.has(*shm):
        found["cpu_s_per_gib"] = results.cpu_s_per_gib(*shm)
        found["idle_cores"] = results.idle_cores["kvpool shm"]
        rivals = [peer for peer in peers if results.has(peer, "get_32x1m")]
        if rivals:
            best = max(rivals, key=lambda peer: results.gbps(peer, "get_32x1m").median)
            found["best_peer"], found["shm_get_32x1m_over_best_peer"] = best, results.over("kvpool shm", best, "get_32x1m")
    return found


COLUMNS = (
    "client",
    "64K us",
    "1M us",
    "32x1M GB/s",
    "x memcpy",
    "x raw tcp",
    "put 64K",
    "put 32x1M",
    "probe 512",
    "CPU s/GiB",
    "idle cores",
)
_KEYS = (
    "get_64k_us", "get_1m_us", "get_32x1m_gbps", "get_32x1m_over_memcpy", "get_32x1m_over_raw",
    "put_64k_us", "put_32x1m_gbps", "probe512_us", "cpu_s_per_gib", "idle_cores",
)  # fmt: skip


def table_row(name: str, figures: Mapping[str, object]) -> tuple[str, ...]:
    """A contestant's line under `COLUMNS`: medians."""
    return (name, *(_short(figures.get(key)) for key in _KEYS))


def _short(value: object) -> str:
    number = value.median if isinstance(value, Spread) else value
    if not isinstance(number, float):
        return "-"
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"
