"""The figures of a replay."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvpool.replay.live.run import Sent
from kvpool.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Times in milliseconds, rates 0..1, of the requests that were answered whole; `failed` counts the others by code.

    `hit_rate`: prompt tokens that were not computed, of all. `ideal_hit_rate`: those that an earlier request had too, of all.
    `late_p99_ms`: by how much the replay itself missed the requests' times.
    """

    requests: int
    answered: int
    failed: dict[str, int]
    too_long: int
    took_s: float
    prompt_tokens: int
    completion_tokens: int
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    tpot_mean_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float
    hit_rate: float
    ideal_hit_rate: float
    late_p99_ms: float


def report(sent: Sent) -> Report:
    """The figures of `sent`."""
    good = [result for result in sent.results if not result.error]
    ttft = sorted(result.ttft_s * 1e3 for result in good)
    tpot = sorted(result.tpot_s * 1e3 for result in good if result.tpot_s is not None)
    prompt = sum(result.prompt_tokens for result in good)
    return Report(
        requests=len(sent.results),
        answered=len(good),
        failed=dict(Counter(result.error for result in sent.results if result.error)),
        too_long=sent.too_long,
        took_s=round(sent.took_s, 3),
        prompt_tokens=prompt,
        completion_tokens=sum(result.completion_tokens for result in good),
        ttft_mean_ms=_mean(ttft),
        ttft_p50_ms=_cut(ttft, 0.5),
        ttft_p99_ms=_cut(ttft, 0.99),
        tpot_mean_ms=_mean(tpot),
        tpot_p50_ms=_cut(tpot, 0.5),
        tpot_p99_ms=_cut(tpot, 0.99),
        hit_rate=round(sum(result.cached_tokens for result in good) / max(1, prompt), 4),
        ideal_hit_rate=round(_ideal(sent.sent, [result.prompt_tokens for result in sent.results], sent.size), 4),
        late_p99_ms=_cut(sorted(result.late_s * 1e3 for result in sent.results), 0.99),
    )


def _ideal(requests: Sequence[TraceRequest], lengths: Sequence[int], size: int) -> float:
    """Tokens in leading blocks that came before, of all; at least one token of each prompt is computed."""
    seen: set[int] = set()
    hit = 0
    for request, length in zip(requests, lengths, strict=True):
        known = next((at for at, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        hit += max(0, min(known * size, length - 1))
        seen.update(request.blocks)
    return hit / max(1, sum(lengths))


def _mean(values: Sequence[float]) -> float:
    return round(fmean(values), 3) if values else 0.0


def _cut(ordered: Sequence[float], share: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3) if ordered else 0.0
