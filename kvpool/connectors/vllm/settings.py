"""What `kv_connector_extra_config` says, checked: an unknown or wrong entry is an error that says what to do.

| key | meaning | default |
|---|---|---|
| `pool` | `host:port[,host:port...]` or a cluster URL (`redis://...`) | needed |
| `transport` | `auto`, `shm`, `ucx`, `tcp` or `grpc` | `auto` |
| `load` | `auto`, `sync`, `async` or `layers` | `auto` |
| `sync_bytes` | `auto` loads up to so many bytes within the step, from a node of this host | 64 MiB |
| `load_s`, `save_s` | longest load and save, seconds | 5, 5 |
| `lookup_s` | longest lookup, seconds | 0.25 |
| `min_blocks` | fewer blocks than this are computed, not loaded | 1 |
| `save_decode` | also save blocks that hold generated tokens | true |
| `hold_share` | share of the engine's blocks that saves may hold back at once | 0.25 |
| `weights` | text that stands for the weights where no safetensors are found | none |
| `salt` | text that keeps this deployment's blocks apart | none |
| `untested_vllm` | start with a vLLM outside the tested range | false |
| `fail_on_lost_load` | accept `kv_load_failure_policy` other than `recompute` | false |
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, cast

from kvpool.client.choose import AUTO
from kvpool.errors import ConfigError
from kvpool.units import MIB

Load = Literal["auto", "sync", "async", "layers"]
LOADS = ("auto", "sync", "async", "layers")
TRANSPORTS = (AUTO, "shm", "ucx", "tcp", "grpc")
POLICY = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """See the table above. Durations are seconds."""

    pool: str
    transport: str = AUTO
    load: Load = "auto"
    sync_bytes: int = 64 * MIB
    load_s: float = 5.0
    save_s: float = 5.0
    lookup_s: float = 0.25
    min_blocks: int = 1
    save_decode: bool = True
    hold_share: float = 0.25
    weights: str = ""
    salt: str = ""
    untested_vllm: bool = False
    fail_on_lost_load: bool = False

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Self:
        """The settings that `extra` spells. Raises `ConfigError`."""
        known = {field.name: field for field in fields(cls)}
        for name in extra:
            if name not in known:
                raise ConfigError(f"kv_connector_extra_config: {name!r} is not known; what is: {', '.join(known)}")
        pool = extra.get("pool")
        if not isinstance(pool, str) or not pool.strip():
            raise ConfigError('kv_connector_extra_config: say where the pool is, {"pool": "host:port"} or {"pool": "redis://host:port/0"}')
        if "://" not in pool and any(":" not in part for part in pool.split(",")):
            raise ConfigError(f"kv_connector_extra_config: pool {pool!r} names no port; write host:port[,host:port] or redis://host:port/0")
        values: dict[str, Any] = {name: _checked(name, value, known[name].default) for name, value in extra.items() if name != "pool"}
        return cls(pool=pool.strip(), **values)


def check_policy(policy: str, settings: Settings) -> None:
    """Raise `ConfigError` unless a load that fails is to be recomputed, or the operator wants otherwise in so many words."""
    if policy != POLICY and not settings.fail_on_lost_load:
        raise ConfigError(
            f'kv_load_failure_policy is "{policy}": a block that leaves the pool before it is loaded would fail its request. Put '
            f'"kv_load_failure_policy":"{POLICY}" into --kv-transfer-config, or "fail_on_lost_load":true into kv_connector_extra_config'
        )


_RANGES: dict[str, tuple[float, float]] = {
    "sync_bytes": (0, 1 << 40),
    "load_s": (0.01, 600),
    "save_s": (0.01, 600),
    "lookup_s": (0.001, 10),
    "min_blocks": (1, 1 << 20),
    "hold_share": (0.0, 0.9),
}
_CHOICES: dict[str, tuple[str, ...]] = {"load": LOADS, "transport": TRANSPORTS}


def _checked(name: str, value: object, default: object) -> object:
    where = f"kv_connector_extra_config: {name}"
    if name in _CHOICES:
        if value not in _CHOICES[name]:
            raise ConfigError(f"{where} is {value!r}; choose {', '.join(_CHOICES[name])}")
        return value
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}; write true or false")
        return value
    if isinstance(default, str):
        if not isinstance(value, str):
            raise ConfigError(f"{where} is {value!r}; write text")
        return value
    low, high = _RANGES[name]
    number = isinstance(value, int) or (isinstance(value, float) and isinstance(default, float))
    if isinstance(value, bool) or not number or not low <= cast("float", value) <= high:
        raise ConfigError(f"{where} is {value!r}; write a number from {low:g} to {high:g}")
    return type(default)(value)  # type: ignore[call-arg]
