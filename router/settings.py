"""Every limit of the router, in one place; `__main__` turns flags into these."""

from dataclasses import dataclass

from kvpool.errors import ConfigError

_MAY_BE_OFF = ("direct_tokens", "help_tokens", "follow_tokens", "prefetch_tokens", "slo_ttft_s", "slo_tpot_s", "key_requests_per_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Time limits in seconds and bounds on what is held. All positive, but for those that can be 0 for "not at all"."""

    request_timeout_s: float = 120.0
    """From a request's arrival to its last token, retries and waiting for workers included."""
    stall_timeout_s: float = 20.0
    """A worker that sends nothing for so long is asked whether it lives."""
    status_timeout_s: float = 5.0
    """How long it may take to answer that."""
    pool_timeout_s: float = 0.25
    """How long the pool may take to say what it holds; past it the choice is made without."""
    publish_timeout_s: float = 12.0
    """How long to wait after the first token for the pool to hold the prompt; past it the decode worker computes it."""
    client_timeout_s: float = 30.0
    """How long a caller may take to send its body, or to take the next piece of its answer."""
    keepalive_s: float = 15.0
    """How long the caller of a stream waits for its first text before it is sent a comment, and then another each time."""
    max_failures: int = 6
    """Failed attempts after which a request is given up: a request that kills its workers must not kill them all."""
    max_in_flight: int = 2048
    """Requests served or waiting at once; more are refused with 429."""
    max_queued: int = 1024
    """Requests waiting for a worker at once, of those that need a prefill and of those that don't; more are refused with 429."""
    prefill_slots: int = 8
    """Requests given to a prefill worker at once: the others wait here, where their order and place can still change."""
    decode_slots: int = 256
    """Requests given to a decode worker at once, if it doesn't say that it takes fewer."""
    direct_tokens: int = 64
    """A prompt of which no more than this is to be computed goes to a decode worker at once; 0: none does, nor by `help_tokens`."""
    help_tokens: int = 16384
    """A prompt with no more than this to compute goes to a decode worker where it would wait longer for a prefill worker; 0: none."""
    follow_tokens: int = 256
    """Fewer tokens than this, missing and computed by another already, are not waited for; 0: nobody follows."""
    follow_timeout_s: float = 30.0
    """How long after a worker began with it a request is waited for by those that want the same; past it one of them computes it."""
    prefetch_tokens: int = 8192
    """Tokens whose blocks are fetched and held for requests that wait in line, for all together; 0: none."""
    slo_ttft_s: float = 0.0
    """Target for the time to the first token: a request expected to take longer is refused with 429; 0: none."""
    slo_tpot_s: float = 0.0
    """Target for the time between two tokens: a request that would make it longer is refused with 429; 0: none."""
    key_requests_per_s: float = 0.0
    """Requests that may be made with one API key per second; 0: any number."""
    max_body_bytes: int = 4 << 20
    """Larger request bodies are refused with 413."""
    index_blocks: int = 1 << 18
    """Blocks remembered per worker and per node."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            least = 0 if name in _MAY_BE_OFF else 1e-9
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be {'0 (off) or more' if not least else 'positive'}, got {getattr(self, name)}")
