"""What an engine and a worker can be told. No torch here: a wrong flag is refused before anything large is loaded."""

from dataclasses import dataclass, field
from typing import Literal

from kvpool.engine.attention.settings import AttentionSettings
from kvpool.errors import ConfigError
from kvpool.units import GIB, MIB
from kvpool.wire.guard import OPEN, Guard

Role = Literal["prefill", "decode"]
Layout = Literal["paged", "vattention"]


def check_device(device: str, *, layout: Layout = "paged", steady: bool = False) -> None:
    """Raise `ConfigError` for a name that is no device's, and for what only the CPU does."""
    kind, _, index = device.partition(":")
    if device != "cpu" and not (kind == "cuda" and (not index or index.isdecimal()) and device != "cuda:"):
        raise ConfigError(f"no device {device!r}; there are cpu, cuda, cuda:0, cuda:1...")
    if device != "cpu" and layout == "vattention":
        raise ConfigError(f"vattention maps pages of the CPU's memory; on {device} the layout is paged: leave --layout out")
    if device != "cpu" and steady:
        raise ConfigError(f"on {device} the bits of a row depend on how many are computed with it: leave --deterministic out")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Cores per pass, prompt tokens per pass, and the bounds: sequences held and queued, KV bytes of both kinds.

    `tpot_target_ms`: passes take fewer prompt tokens where answers would come slower than a token in so long, in the mean; 0: they don't.
    `layout`: how attention reads what does not lie in one piece (`paged/store.py`). `steady`: the bits of a request's scores depend on
    nobody it is computed with. `device`: what computes, and where weights and KV are (`cpu`, `cuda`, `cuda:1`). `attention`: what decodes
    read of their context when they don't say; None is everything.
    """

    threads: int = 1
    chunk_tokens: int = 256
    tpot_target_ms: float = 0.0
    max_active: int = 64
    max_queued: int = 256
    kv_bytes: int = 8 * GIB
    resident_bytes: int = 512 * MIB
    steady: bool = False
    layout: Layout = "paged"
    device: str = "cpu"
    attention: AttentionSettings | None = None

    def __post_init__(self) -> None:
        check_device(self.device, layout=self.layout, steady=self.steady)
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.threads}")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if not 0 <= self.tpot_target_ms < 1e6:
            raise ConfigError(f"tpot_target_ms must be at least 0 (no target) and below 1,000,000, got {self.tpot_target_ms}")
        if self.tpot_target_ms and self.steady:
            raise ConfigError("with a target for the time between tokens prompts are cut by who else is there: leave --deterministic out")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """How a worker is set up. Without `cluster` it stands alone: no membership, no pool."""

    role: Role
    served_name: str
    cluster: str | None = None
    listen: str = "127.0.0.1:0"
    transport: str = "auto"
    drain_s: float = 3.0
    settings: EngineSettings = field(default_factory=EngineSettings)
    guard: Guard = OPEN
