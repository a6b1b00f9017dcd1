"""Where a stock engine is, as `--engine` spells it: its URL, then options after commas.

::

    http://10.0.0.7:8000                                          its events are where it says itself, if it says so
    http://10.0.0.7:8000,events=tcp://10.0.0.7:5557,replay=tcp://10.0.0.7:5558
    https://engines.example:443,key=/etc/kvpool/engine.key        an API key in a file; `model`: what the engine calls the model
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from kvpool.errors import ConfigError

_OPTIONS = ("events", "replay", "topic", "model", "key")
_PORTS = {"http": 80, "https": 443}
_ZMQ = ("tcp://", "ipc://")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlace:
    """One engine. `events` and `replay` are endpoints to connect to; without `events` the engine is asked where it publishes."""

    host: str
    port: int
    tls: bool = False
    events: str = ""
    replay: str = ""
    topic: str = ""
    model: str = ""
    """What the engine calls the model; "": the first that it lists."""
    key: Path | None = None
    """File with the API key to show."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From what stands after `--engine`. Raises `ConfigError`."""
        url, *rest = text.split(",")
        options: dict[str, str] = {}
        for one in rest:
            name, separator, value = one.partition("=")
            if name not in _OPTIONS or not separator or not value or name in options:
                raise ConfigError(
                    f"an engine is URL[,name=value...] with the names {', '.join(_OPTIONS)}, each once; got {one!r} in {text!r}"
                )
            options[name] = value
        for name in ("events", "replay"):
            if name in options and (not options[name].startswith(_ZMQ) or "*" in options[name]):
                raise ConfigError(f"{name} of an engine is tcp://host:port or ipc://path to connect to, got {options[name]!r}")
        if "replay" in options and "events" not in options:
            raise ConfigError(f"an engine with replay has events too, got {text!r}")
        key = options.pop("key", None)
        host, port, tls = _split(url)
        return cls(host=host, port=port, tls=tls, key=Path(key) if key else None, **options)

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def id(self) -> str:
        """The same for every router that is given the same URL: 32 hex digits."""
        return hashlib.sha256(f"{'https' if self.tls else 'http'}://{self.address}".encode()).hexdigest()[:32]

    def reach(self, endpoint: str) -> str:
        """Where to connect to what the engine has bound at `endpoint`: a wildcard is its host."""
        for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
            if endpoint.startswith(wildcard):
                host = f"[{self.host}]" if ":" in self.host else self.host
                return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
        return endpoint


def _split(url: str) -> tuple[str, int, bool]:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"an engine's URL is http://host:port, got {url!r}: {error}") from None
    plain = parts.path.rstrip("/") in ("", "/v1") and not parts.query and not parts.fragment and "@" not in parts.netloc
    if parts.scheme not in _PORTS or not parts.hostname or not plain:
        raise ConfigError(f"an engine's URL is http://host:port or https://host:port, got {url!r}")
    return parts.hostname, port or _PORTS[parts.scheme], parts.scheme == "https"
