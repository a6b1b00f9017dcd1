"""The figures of one run, and that its books balance."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from kvpool.errors import LocalError
from kvpool.replay.sim.cluster import Cluster
from kvpool.replay.sim.request import Fate
from kvpool.replay.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Times in seconds, shares 0..1.

    `goodput`: requests that were complete within both SLOs, of all. `hit_rate`: prompt tokens that were not computed, of those prefilled.
    `imbalance`: seconds computed, the busiest prefill node's over the mean. `busy`: that mean over the time from the first arrival
    to the last first token. `wasted_prefills` and `rejected` are numbers of requests.
    """

    requests: int
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_max_s: float
    tbt_mean_s: float
    goodput: float
    hit_rate: float
    imbalance: float
    busy: float
    prefill_s: float
    rejected: int
    wasted_prefills: int
    load_swing: float


def outcome(world: World, cluster: Cluster, fates: Sequence[Fate]) -> Outcome:
    """The figures of a run that is over. Raises `LocalError` when its books don't balance."""
    check(cluster, fates)
    ttfts = sorted(fate.ttft_s for fate in fates if fate.ttft_s is not None)
    done = [fate for fate in fates if fate.finished_s is not None]
    good = sum(
        fate.ttft_s is not None
        and fate.ttft_s <= world.ttft_slo_s
        and (fate.step_s <= world.tbt_slo_s or fate.request.output_tokens == 1)  # one token has no time between tokens
        for fate in done
    )
    prefilled = [fate for fate in fates if fate.first_token_s is not None]
    busy = [node.busy_s for node in cluster.prefill]
    span = max((fate.first_token_s or 0.0 for fate in fates), default=0.0) - min((fate.request.arrived_s for fate in fates), default=0.0)
    return Outcome(
        requests=len(fates),
        ttft_mean_s=fmean(ttfts) if ttfts else 0.0,
        ttft_p50_s=ttfts[len(ttfts) // 2] if ttfts else 0.0,
        ttft_p99_s=ttfts[int(0.99 * len(ttfts))] if ttfts else 0.0,
        ttft_max_s=ttfts[-1] if ttfts else 0.0,
        tbt_mean_s=fmean(fate.step_s for fate in done) if done else 0.0,
        goodput=good / max(1, len(fates)),
        hit_rate=sum(fate.hit_tokens for fate in prefilled) / max(1, sum(fate.request.prompt_tokens for fate in prefilled)),
        imbalance=max(busy) / fmean(busy) if any(busy) else 1.0,
        busy=fmean(busy) / span if span > 0 else 0.0,
        prefill_s=fmean(fate.compute_s for fate in prefilled) if prefilled else 0.0,
        rejected=sum(fate.rejected_s is not None for fate in fates),
        wasted_prefills=sum(fate.wasted for fate in fates),
        load_swing=pstdev(load for _, load in cluster.loads) if len(cluster.loads) > 1 else 0.0,
    )


def check(cluster: Cluster, fates: Sequence[Fate]) -> None:
    """Every request ended once, none before it came, nothing computed beyond its prompt, nobody busier than the time there was."""
    for fate in fates:
        request = fate.request
        if (fate.finished_s is None) == (fate.rejected_s is None):
            raise LocalError(f"request {request.request_id} ended {'twice' if fate.finished_s is not None else 'never'}")
        times = [request.arrived_s, *(t for t in (fate.first_token_s, fate.finished_s or fate.rejected_s) if t is not None)]
        if times != sorted(times) or not 0 <= fate.hit_tokens < request.prompt_tokens:
            raise LocalError(f"request {request.request_id} has times {times} and {fate.hit_tokens} tokens hit")
    for number, node in enumerate(cluster.prefill):
        if node.busy_s > cluster.now * (1 + 1e-9):
            raise LocalError(f"prefill node {number} computed {node.busy_s} s in {cluster.now} s")
        if node.running is not None or node.next() is not None:
            raise LocalError(f"prefill node {number} has work left")
