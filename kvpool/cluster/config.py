"""What a whole cluster agrees on: one small record with a version number, kept in the membership store and known to every member.

Each change takes the record as it is, makes the next version of it, and is refused when somebody else was faster, so no
change is lost. Of two versions the higher one holds, wherever it is met: a store that forgot (restarted empty, failed over
to a replica that was behind) is told again by the next heartbeat of anybody who knows better. Version 0 is the defaults,
what a cluster runs with before its first change; it is never stored.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from kvpool.errors import ConfigError, ProtocolError
from kvpool.units import MIB, parse_duration, parse_size

FORMAT = 1
MAX_COPIES = 16
MAX_NAMESPACES = 512
"""Namespaces with a number of copies of their own."""
MAX_CONFIG_BYTES = 65536

_FINGERPRINT = re.compile(r"^[0-9a-f]{32}$")
_PREFIX = "namespace_copies."
_RANGES = {
    "version": (0, 2**53 - 1),
    "copies": (1, MAX_COPIES),
    "extent_tokens": (1, 1 << 20),
    "handover_s": (0, 3600),
    "rebalance_bytes_per_s": (MIB, 1 << 50),
    "hot_reads": (0, 1 << 30),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Settings of a cluster. Raises `ConfigError` when a value is out of its range."""

    version: int = 0
    """Grows by one a change; 0 before the first."""
    copies: int = 1
    """On how many nodes each block is to be, 1..16."""
    namespace_copies: dict[str, int] = field(default_factory=dict, hash=False)
    """The same for some namespaces: fingerprint as 32 hex digits -> copies."""
    extent_tokens: int = 512
    """Consecutive tokens of a sequence that live together."""
    handover_s: float = 30.0
    """How long a node that joins may take until it has its share, in seconds."""
    rebalance_bytes_per_s: int = 256 * MIB
    """How fast one node may push blocks to others to repair, drain and balance."""
    hot_reads: int = 256
    """An extent that is read so often within a minute gets a copy more; 0 for never."""
    near_copies: bool = True
    """Whether nodes keep what they fetch for the workers of their own host."""

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            kinds = (int, float) if name == "handover_s" else (int,)
            if type(value) not in kinds or not least <= value <= most:
                raise ConfigError(f"{name} must be {least}..{most}, got {value!r}")
        if type(self.near_copies) is not bool:
            raise ConfigError(f"near_copies must be true or false, got {self.near_copies!r}")
        if not isinstance(self.namespace_copies, dict) or len(self.namespace_copies) > MAX_NAMESPACES:
            raise ConfigError(f"namespace_copies must map at most {MAX_NAMESPACES} namespaces to a number of copies")
        for fingerprint, copies in self.namespace_copies.items():
            _fingerprint(fingerprint)
            if type(copies) is not int or not 1 <= copies <= MAX_COPIES:
                raise ConfigError(f"{_PREFIX}{fingerprint} must be 1..{MAX_COPIES}, got {copies!r}")

    def copies_of(self, fingerprint: str) -> int:
        """Copies wanted in the namespace `fingerprint` (32 hex digits)."""
        return self.namespace_copies.get(fingerprint, self.copies)

    def settings(self) -> dict[str, Any]:
        """Every setting by the name `with_setting` takes, without the version; namespaces follow `copies`."""
        values: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if name == "namespace_copies":
                values.update({_PREFIX + fingerprint: value[fingerprint] for fingerprint in sorted(value)})
            elif name != "version":
                values[name] = value
        return values

    def setting(self, name: str) -> Any:
        """The value of one setting, by the name `with_setting` takes. Raises `ConfigError`."""
        if name.startswith(_PREFIX):
            return self.copies_of(_fingerprint(name.removeprefix(_PREFIX)))
        if name not in _READERS:
            raise ConfigError(f"no setting {name!r}; there are {', '.join(_READERS)} and {_PREFIX}FINGERPRINT")
        return getattr(self, name)

    def with_setting(self, name: str, text: str) -> "ClusterConfig":
        """A copy with one setting read from `text` as people write it: `2`, `30s`, `512MiB`, `true`.

        `namespace_copies.FINGERPRINT` takes a number, or `default` to forget it. Raises `ConfigError`.
        """
        if name.startswith(_PREFIX):
            fingerprint = _fingerprint(name.removeprefix(_PREFIX))
            rest = {key: value for key, value in self.namespace_copies.items() if key != fingerprint}
            own = {} if text == "default" else {fingerprint: _whole(name, text)}
            return replace(self, namespace_copies={**rest, **own})
        self.setting(name)  # refuses what isn't one
        return replace(self, **{name: _READERS[name](name, text)})

    def encode(self) -> str:
        """The JSON text under which a store keeps it."""
        return json.dumps({"v": FORMAT, **asdict(self)}, separators=(",", ":"), sort_keys=True)

    @classmethod
    def decode(cls, text: bytes | str) -> "ClusterConfig":
        """The config in `text`; fields of a later release are left out. Raises `ProtocolError` for anything but a config."""
        if len(text) > MAX_CONFIG_BYTES:
            raise ProtocolError(f"a cluster config of {len(text)} bytes is over the limit of {MAX_CONFIG_BYTES}")
        try:
            found: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"the cluster config is not JSON: {error}") from error
        if not isinstance(found, dict) or found.get("v") != FORMAT:
            raise ProtocolError(f"the cluster config is not of format {FORMAT}")
        try:
            config = cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})
        except ConfigError as error:
            raise ProtocolError(f"the cluster config breaks a rule: {error}") from error
        if config.version == 0:
            raise ProtocolError("the cluster config has no version")
        return config


def _fingerprint(text: Any) -> str:
    if not isinstance(text, str) or not _FINGERPRINT.match(text):
        raise ConfigError(f"a namespace is named by its fingerprint, 32 lowercase hex digits, got {text!r}")
    return text


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a whole number, got {text!r}") from error


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_duration(text) / 1e9


def _yes_or_no(name: str, text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, got {text!r}")
    return text == "true"


_READERS: dict[str, Callable[[str, str], Any]] = {
    "copies": _whole,
    "extent_tokens": _whole,
    "handover_s": _seconds,
    "rebalance_bytes_per_s": lambda _, text: parse_size(text),
    "hot_reads": _whole,
    "near_copies": _yes_or_no,
}
