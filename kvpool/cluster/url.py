"""Cluster URLs: which store, which cluster in it, and how to get there.

::

    redis://[user:password@]host:port[/db]?cluster=NAME                      one Redis-compatible server
    redis+sentinel://[user:password@]h1:p1,h2:p2,…/SERVICE?cluster=NAME      the master that these sentinels call SERVICE
    redis+cluster://[user:password@]h1:p1,h2:p2,…?cluster=NAME               a Redis Cluster, of which these are some nodes
    unix://[user:password@]/PATH?cluster=NAME                                one server, through a socket
    memory://NAME                                                            one process, for tests

`rediss` instead of `redis` is TLS on every connection. The options after the `?`, with `&` between them:

    cluster                                      name of the cluster in the store; "default"
    lease_ms                                     how long a silent member is believed to live; 3000
    password_file                                file with the password, instead of one in the URL; read at each connection
    db                                           for sentinel and unix: number of the database; 0
    sentinel_username, sentinel_password         for sentinel: who we are to the sentinels; nobody
    ssl_ca_certs                                 for rediss: file of the only authorities to trust; the system's
    ssl_certfile, ssl_keyfile                    for rediss: our own certificate and its key; none
    ssl_check_hostname                           for rediss: true or false; true

A user and a password are percent-encoded. They are in no message and no `repr`.
"""

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from kvpool.cluster.member import MAX_LEASE_MS, MIN_LEASE_MS
from kvpool.errors import ConfigError

DEFAULT_LEASE_MS = 3000
BEATS_PER_LEASE = 3
"""A heartbeat every third of a lease: two may be lost before a live member is given up."""
POLLS_PER_LEASE = 10
MAX_HOSTS = 64
_KINDS = {
    "redis": "single",
    "rediss": "single",
    "unix": "unix",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
    "memory": "memory",
}
_OPTIONS = {"sentinel": {"db", "sentinel_username", "sentinel_password"}, "unix": {"db"}}
_TLS_OPTIONS = {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname"}
_DEFAULT_PORT = {"single": 6379, "sentinel": 26379, "cluster": 6379}
_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}$")
_HOST = re.compile(r"^(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::(\d{1,5}))?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterUrl:
    """A parsed cluster URL."""

    kind: str
    """single, unix, sentinel, cluster or memory."""
    name: str
    lease_ms: int
    where: str = ""
    """The store without its secrets, for messages."""
    hosts: tuple[tuple[str, int], ...] = ()
    """The server, some sentinels, or some nodes of a Redis Cluster."""
    path: str = ""
    """Of a socket."""
    service: str = ""
    """What the sentinels call the master."""
    login: dict[str, Any] = field(default_factory=dict, repr=False)
    """Database, user and password, as redis-py names them."""
    password_file: str = ""
    """Where the password stands instead."""
    sentinel_login: dict[str, Any] = field(default_factory=dict, repr=False)
    tls: dict[str, Any] = field(default_factory=dict)
    """`ssl_check_hostname` and the files, by the names of their options; empty without TLS."""

    @property
    def beat_s(self) -> float:
        """Seconds between two heartbeats."""
        return self.lease_ms / 1000 / BEATS_PER_LEASE

    @property
    def poll_s(self) -> float:
        """Seconds between two looks at the store."""
        return self.lease_ms / 1000 / POLLS_PER_LEASE

    @property
    def timeout_s(self) -> float:
        """Seconds that one call of the store may take."""
        return min(1.0, self.lease_ms / 1000 / 3)


def parse_cluster_url(url: str) -> ClusterUrl:
    """Split a cluster URL (forms above). Raises `ConfigError` saying what is wrong with it."""
    parts = urlsplit(url)
    kind = _KINDS.get(parts.scheme)
    if kind is None:
        raise ConfigError(f"a cluster URL starts with {', '.join(f'{scheme}://' for scheme in _KINDS)}, got {_hide(url)!r}")
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    lease_ms = query.pop("lease_ms", str(DEFAULT_LEASE_MS))
    if not lease_ms.isdecimal() or not MIN_LEASE_MS <= int(lease_ms) <= MAX_LEASE_MS:
        raise ConfigError(f"lease_ms in a cluster URL must be {MIN_LEASE_MS}..{MAX_LEASE_MS}, got {lease_ms!r}")
    if kind == "memory":
        if parts.path.strip("/") or query:
            raise ConfigError(f"an in-memory cluster URL is memory://NAME[?lease_ms=N], got {url!r}")
        return ClusterUrl(kind=kind, name=_name(parts.netloc), lease_ms=int(lease_ms), where=f"memory://{parts.netloc}")
    name = _name(query.pop("cluster", "default"))
    secure = parts.scheme.startswith("rediss")
    known = {"password_file"} | _OPTIONS.get(kind, set()) | (_TLS_OPTIONS if secure else set())
    if unknown := sorted(set(query) - known):
        there = ", ".join(("cluster", "lease_ms", *sorted(known)))
        raise ConfigError(f"unknown option in the cluster URL: {', '.join(unknown)}; {parts.scheme}:// takes {there}")
    login, _, places = parts.netloc.rpartition("@")
    hosts = _hosts(kind, places)
    return ClusterUrl(
        kind=kind,
        name=name,
        lease_ms=int(lease_ms),
        where=f"{places}{parts.path}",
        hosts=hosts,
        login={"db": _database(kind, parts.path, query), **_login(*login.split(":", 1), file=query.get("password_file"))},
        password_file=query.get("password_file", ""),
        sentinel_login=_login(query.get("sentinel_username", ""), query.get("sentinel_password", "")),
        tls=_tls(query) if secure else {},
        **_path(kind, parts.path),
    )


def _hide(url: str) -> str:
    """`url` for a message, without what may be secret."""
    return re.sub(r"//[^/?#]*@", "//***@", url).partition("?")[0]


def _name(name: str) -> str:
    if not _NAME.match(name):
        raise ConfigError(f"a cluster's name is 1..64 letters, digits, '.', '_' or '-', got {name!r}")
    return name


def _hosts(kind: str, places: str) -> tuple[tuple[str, int], ...]:
    if kind == "unix":
        if places:
            raise ConfigError(f"a cluster URL of a socket is unix:///PATH, with three slashes, got a host {places!r}")
        return ()
    hosts: list[tuple[str, int]] = []
    for place in places.split(","):
        match = _HOST.match(place)
        port = int(match.group(3) or _DEFAULT_PORT[kind]) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise ConfigError("a cluster URL names its servers as host:port, after user:password@ with both percent-encoded")
        hosts.append((match.group(1) or match.group(2), port))
    if len(hosts) > (1 if kind == "single" else MAX_HOSTS):
        some = f"at most {MAX_HOSTS} are of use" if kind != "single" else "several are redis+sentinel:// or redis+cluster://"
        raise ConfigError(f"too many servers in the cluster URL: {some}")
    return tuple(hosts)


def _database(kind: str, path: str, query: dict[str, str]) -> int:
    text = (path.strip("/") or "0") if kind == "single" else query.get("db", "0")
    if not text.isdecimal():
        raise ConfigError(f"the database in a cluster URL is a number, got {text!r}")
    return int(text)


def _path(kind: str, path: str) -> dict[str, str]:
    if kind == "unix":
        if not path.strip("/"):
            raise ConfigError("a cluster URL of a socket is unix:///PATH")
        return {"path": unquote(path)}
    if kind == "sentinel":
        service = unquote(path.strip("/"))
        if not service or "/" in service:
            raise ConfigError("a cluster URL of sentinels ends in the name they have for the master: redis+sentinel://h1:p1,h2:p2/SERVICE")
        return {"service": service}
    if kind == "cluster" and path.strip("/"):
        raise ConfigError(f"a Redis Cluster has no databases: take {path!r} out of the cluster URL")
    return {}


def _login(user: str = "", password: str = "", *, file: str | None = None) -> dict[str, Any]:
    if file is not None and (password or not file):
        raise ConfigError("password_file in a cluster URL is a path, and there is no other password beside it")
    if user and not password and not file:
        raise ConfigError("a user in a cluster URL needs a password: user:password@, :password@ for the default user, or password_file")
    name = {"username": unquote(user) or None} if password or file else {}
    return name | ({"password": unquote(password)} if password else {})


def _tls(query: dict[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {name: value for name, value in query.items() if name in _TLS_OPTIONS}
    check = options.pop("ssl_check_hostname", "true")
    if check not in ("true", "false"):
        raise ConfigError(f"ssl_check_hostname in a cluster URL is true or false, got {check!r}")
    if ("ssl_certfile" in options) != ("ssl_keyfile" in options):
        raise ConfigError("ssl_certfile and ssl_keyfile in a cluster URL go together")
    return {"ssl_check_hostname": check == "true", **options}
