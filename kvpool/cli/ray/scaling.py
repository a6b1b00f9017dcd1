"""How many workers a group should have: samples in, a count out. Pure.

More are wanted when requests pile up: more than `requests_each` per worker, or a first token later than `ttft_s` while requests
wait behind each other (a long prompt on an idle group isn't made faster by another worker). Fewer are wanted when one worker
less would still be at most half loaded. Either must last: `up_after_s` is short, `down_after_s` long, and in between
nothing changes. While workers that were asked for have yet to arrive, no more are asked for.

    requests <= half of (wanted - 1) * each, in time:  calm      -> after down_after_s one less
    requests >  wanted * each, or late:                pressed   -> after up_after_s as many as the requests need, at most twice as many
    otherwise:                                         fine
"""

from dataclasses import dataclass

from kvpool.errors import ConfigError

CALM_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Fewest and most workers of each group."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"--min and --max need 1 <= min <= max, got {self.least} and {self.most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """When a group is pressed: `requests_each` per worker, `ttft_s` seconds to the first token (None: not this group's business)."""

    requests_each: int
    ttft_s: float | None
    up_after_s: float = 5.0
    down_after_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A group at `at_s` seconds: workers that answered, requests that they work on or queue, and the mean time to first token of the
    requests that ended since the last sample (None: none did)."""

    at_s: float
    workers: int
    requests: int
    ttft_s: float | None = None


class GroupScale:
    """The wanted count of one group, between `limits`. Feed it samples in the order of their times."""

    def __init__(self, rules: Rules, limits: Limits, *, wanted: int) -> None:
        """`wanted` is what the group has been started with."""
        if not limits.least <= wanted <= limits.most:
            raise ConfigError(f"a group of {wanted} workers is not within --min {limits.least} and --max {limits.most}")
        self._rules = rules
        self._limits = limits
        self._wanted = wanted
        self._ttft_s = 0.0
        self._mood = "fine"
        self._since_s = 0.0

    @property
    def wanted(self) -> int:
        """The count as of the last sample."""
        return self._wanted

    def step(self, sample: Sample) -> int:
        """Take a sample in; the wanted count."""
        if sample.ttft_s is not None:
            self._ttft_s = sample.ttft_s
        elif sample.requests == 0:
            self._ttft_s = 0.0  # nobody waits: what was late is over
        mood = self._mood_of(sample)
        if mood != self._mood:
            self._mood, self._since_s = mood, sample.at_s
        lasted_s = sample.at_s - self._since_s
        if mood == "pressed" and lasted_s >= self._rules.up_after_s:
            needed = -(-sample.requests // self._rules.requests_each)
            self._change(min(self._limits.most, max(self._wanted + 1, min(needed, 2 * self._wanted))))
        elif mood == "calm" and lasted_s >= self._rules.down_after_s:
            self._change(max(self._limits.least, self._wanted - 1))
        return self._wanted

    def _mood_of(self, sample: Sample) -> str:
        late = self._rules.ttft_s is not None and self._ttft_s > self._rules.ttft_s and sample.requests > self._wanted
        if late or sample.requests > self._wanted * self._rules.requests_each:
            return "pressed" if sample.workers >= self._wanted else "fine"
        return "calm" if sample.requests <= CALM_SHARE * (self._wanted - 1) * self._rules.requests_each else "fine"

    def _change(self, wanted: int) -> None:
        self._wanted, self._mood = wanted, "fine"
