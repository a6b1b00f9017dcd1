"""Which attention technique a request or a server wants, as a value and as text. No torch: a wrong one is refused early.

`snapkv:budget=0.25,window=32` is a name and, optionally, settings; what isn't said has its default. `full` is no technique.
`parse_attention` and `str` of its result are inverses.
"""

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_type_hints

from kvpool.errors import ConfigError

Positions = Literal["cache", "original"]
Score = Literal["sum", "mean"]
Pay = Literal["output", "weight"]
Heads = Literal["shared", "own"]
MAX_POWER = 4
"""The weights' highest power: a higher one makes nothing of all but the largest."""

MAX_TOKENS = 1 << 30
"""The largest number that a setting may be: beyond any context. What costs memory by itself is bounded closer."""
MAX_WINDOW, MAX_KERNEL, MAX_PAGE = 1024, 255, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budgeted:
    """`budget` is the tokens read per step and KV head: a share of the prompt (0.25), or their number (256)."""

    budget: float = 0.25

    def __post_init__(self) -> None:
        whole = 1 < self.budget <= MAX_TOKENS and float(self.budget).is_integer()
        self._require(0 < self.budget <= 1 or whole, "a share up to 1, or whole tokens")

    def __str__(self) -> str:
        return f"{name_of(self)}:" + ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))

    @property
    def prompt_queries(self) -> int | None:
        """The last so many tokens of the prompt must be computed where the answer is; None: all of it (`technique.Traits`)."""
        return 0

    def tokens(self, prompt: int) -> int:
        """The budget in tokens, for a prompt of `prompt` tokens. A share is rounded down, as `kvpress` does."""
        return int(prompt * self.budget) if self.budget <= 1 else int(self.budget)

    def _require(self, good: bool, what: str) -> None:
        if not good:
            raise ConfigError(
                f"attention {name_of(self)}: {what}; got {', '.join(f'{f.name}={getattr(self, f.name)}' for f in fields(self))}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingSettings(_Budgeted):
    """`sinks` first tokens and the most recent ones; `positions` counts within the cache (as published) or as in the text."""

    sinks: int = 4
    positions: Positions = "cache"

    def __post_init__(self) -> None:
        super(StreamingSettings, self).__post_init__()
        self._require(0 <= self.sinks <= MAX_TOKENS, f"sinks can't be negative, or over {MAX_TOKENS}")


@dataclass(frozen=True, slots=True, kw_only=True)
class H2OSettings(_Budgeted):
    """The share `heavy` of the budget for heavy hitters, the rest for the most recent; what queries pay them as a sum or a mean per query.

    Queries `pay` the length of what the token adds to their output, or its weight, to the power of `power`; that halves in `fade` tokens
    (0: never). `heads` share their budget or have each its own.
    """

    heavy: float = 0.625
    score: Score = "sum"
    power: int = 2
    fade: int = 100
    pay: Pay = "output"
    heads: Heads = "shared"

    def __post_init__(self) -> None:
        super(H2OSettings, self).__post_init__()
        self._require(0 <= self.heavy <= 1, "heavy is a share of the budget, 0 to 1")
        self._require(1 <= self.power <= MAX_POWER, f"power is 1 to {MAX_POWER}")
        self._require(0 <= self.fade <= MAX_TOKENS, f"fade can't be negative, or over {MAX_TOKENS}")

    @property
    def prompt_queries(self) -> int | None:
        """All of it: each query pays."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKVSettings(_Budgeted):
    """The last `window` prompt tokens choose, by what they `pay`, averaged over `kernel` neighbours (an odd number).

    The share `recent` of the budget is for the most recent tokens, whatever they get. `power`, `pay` and `heads` are as in `H2OSettings`.
    """

    window: int = 128
    kernel: int = 1
    power: int = 2
    recent: float = 0.25
    pay: Pay = "output"
    heads: Heads = "shared"

    def __post_init__(self) -> None:
        super(SnapKVSettings, self).__post_init__()
        self._require(1 <= self.window <= MAX_WINDOW, f"window is at least 1 and at most {MAX_WINDOW}")
        self._require(1 <= self.kernel <= MAX_KERNEL and self.kernel % 2 == 1, f"kernel is odd and at most {MAX_KERNEL}")
        self._require(1 <= self.power <= MAX_POWER, f"power is 1 to {MAX_POWER}")
        self._require(0 <= self.recent <= 1, "recent is a share of the budget, 0 to 1")

    @property
    def prompt_queries(self) -> int | None:
        """The window's: they choose."""
        return self.window


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestSettings(_Budgeted):
    """Pages of `page` tokens; the first `dense` layers read everything."""

    page: int = 16
    dense: int = 2

    def __post_init__(self) -> None:
        super(QuestSettings, self).__post_init__()
        self._require(1 <= self.page <= MAX_PAGE, f"page is at least 1 and at most {MAX_PAGE}")
        self._require(0 <= self.dense <= MAX_TOKENS, f"dense can't be negative, or over {MAX_TOKENS}")


AttentionSettings = StreamingSettings | H2OSettings | SnapKVSettings | QuestSettings
TECHNIQUES: dict[str, type[AttentionSettings]] = {
    "streaming": StreamingSettings,
    "h2o": H2OSettings,
    "snapkv": SnapKVSettings,
    "quest": QuestSettings,
}
FULL = "full"


def name_of(settings: object) -> str:
    """The technique's name."""
    return next(name for name, kind in TECHNIQUES.items() if kind is type(settings))


def spell_attention(settings: AttentionSettings | None) -> str:
    """The text that `parse_attention` reads as `settings`."""
    return FULL if settings is None else str(settings)


def parse_attention(text: str) -> AttentionSettings | None:
    """Settings from `name` or `name:key=value,...`; None for `full`. Raises `ConfigError`, which says what there is."""
    name, _, rest = text.partition(":")
    if name == FULL and not rest:
        return None
    kind = TECHNIQUES.get(name)
    if kind is None:
        raise ConfigError(f"no attention technique {name!r}; there are {', '.join([FULL, *TECHNIQUES])}")
    hints = get_type_hints(kind)
    values: dict[str, int | float | str] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        if key not in hints:
            raise ConfigError(f"attention {name} has no setting {key!r}; it has {', '.join(hints)}")
        if key in values:
            raise ConfigError(f"attention {name}: {key} is given twice")
        values[key] = _value(name, key, value, hints[key])
    return kind(**values)  # type: ignore[arg-type]  # each value was read as its field's type


def _value(name: str, key: str, text: str, kind: type) -> int | float | str:
    if choices := get_args(kind):
        if text not in choices:
            raise ConfigError(f"attention {name}: {key} is one of {', '.join(choices)}, not {text!r}")
        return text
    try:
        return int(text) if kind is int else float(text)
    except ValueError:
        raise ConfigError(f"attention {name}: {key}={text!r} is not a number") from None
