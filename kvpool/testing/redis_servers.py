"""Real membership stores for tests, all made of the embedded Valkey binary: one server, Sentinel with replicas, a Redis Cluster.

Each has an address for a cluster of a given name, and can be killed, started again empty at the same place, stopped as by SIGSTOP
and continued. `front_of` puts something in front of every server, through which clients and servers then talk (`tls_front.py`).
"""

import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, Self

import redis
from redis.crc import key_slot

from kvpool.cluster.child import Child
from kvpool.cluster.embedded import server_argv, server_binary
from kvpool.errors import DeadlineError, UnavailableError

START_S = 20.0
_TRIES = 8

FrontOf = Callable[[int], int]
"""The port in front of a port."""


def free_port() -> int:
    """A port that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition: Callable[[], bool], what: str, within_s: float = START_S) -> None:
    """Poll until `condition` holds. Raises `DeadlineError`."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise DeadlineError(f"not within {within_s} s: {what}")
        time.sleep(0.01)


class Server:
    """One process. `argv` makes its command line for a port; `ready` is what it logs once it serves."""

    def __init__(self, log: Path, argv: Callable[[int], Sequence[str]], ready: str = "Ready to accept connections") -> None:
        self._log = log
        self._argv = argv
        self._ready = ready
        for _ in range(_TRIES):
            self.port = free_port()
            if self._started():
                return
        raise UnavailableError(f"the server did not start, see {log}")

    def start(self) -> None:
        """Again, at the same port."""
        if not self._started():
            raise UnavailableError(f"the server did not start again, see {self._log}")

    def client(self, **login: Any) -> redis.Redis:
        """A connection of the test's own."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5, **login)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait(5)

    def pause(self) -> None:
        """It hangs: connections stay and take bytes, nothing is answered."""
        self._child.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """It goes on."""
        self._child.send_signal(signal.SIGCONT)

    def _started(self) -> bool:
        self._log.unlink(missing_ok=True)
        self._child = Child(self._argv(self.port), log_path=self._log, death_signal=signal.SIGKILL)
        wait_for(lambda: self._child.exit_code is not None or self._ready in self._log.read_text(), f"start of {self._log.name}")
        return self._child.exit_code is None


def plain_server(directory: Path, name: str, *options: str) -> Server:
    """A server with a directory of its own and further `options`."""
    home = directory / name
    home.mkdir()
    quick = ("--repl-diskless-sync-delay", "0")  # a replica need not wait for others that might come
    return Server(home / "log", lambda port: [*server_argv(server_binary(), home, port), *quick, *options])


class Deployment(Protocol):
    """A membership store and what may happen to it. The names of clusters must come from `new_name`."""

    def new_name(self) -> str:
        """A name for a cluster that has never been in this store."""
        ...

    def url(self, name: str, lease_ms: int) -> str:
        """The cluster URL."""
        ...

    @property
    def holder(self) -> Server:
        """The server with the records."""
        ...

    def restart(self) -> None:
        """Start the killed holder again, empty, and wait until it serves."""
        ...

    def close(self) -> None:
        """End all processes."""
        ...


class _Closing:
    """Closes in the end what was entered on `stack`."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> None:
        """End all processes."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _owned(self, server: Server) -> Server:
        self._stack.callback(server.kill)
        return server


class SingleServer(_Closing):
    """One server; with `front_of` and `login`, its URL is `rediss`, as that user, with `tls_options`."""

    def __init__(self, directory: Path, *options: str, front_of: FrontOf | None = None, login: str = "", tls_options: str = "") -> None:
        super().__init__()
        self.holder = self._owned(plain_server(directory, "single", *options))
        self._port = front_of(self.holder.port) if front_of else self.holder.port
        self._scheme = "rediss" if front_of else "redis"
        self._login, self._tls_options = login, tls_options

    def new_name(self) -> str:
        """See `Deployment`."""
        return f"test-{uuid.uuid4().hex[:8]}"

    def url(self, name: str, lease_ms: int) -> str:
        """See `Deployment`."""
        return f"{self._scheme}://{self._login}127.0.0.1:{self._port}/0?cluster={name}&lease_ms={lease_ms}{self._tls_options}"

    def restart(self) -> None:
        """See `Deployment`."""
        self.holder.start()


class SentinelServers(_Closing):
    """A master with replicas, watched by sentinels under the name `main`."""

    def __init__(self, directory: Path, *, replicas: int = 0, sentinels: int = 1, front_of: FrontOf = lambda port: port) -> None:
        super().__init__()
        self._front_of = front_of
        self.servers = [self._owned(plain_server(directory, "master"))]
        master = str(front_of(self.servers[0].port))
        for number in range(replicas):
            self.servers.append(self._owned(plain_server(directory, f"replica{number}", "--replicaof", f"127.0.0.1 {master}")))
        self.sentinels = [self._owned(self._sentinel(directory / f"sentinel{n}", master, sentinels // 2 + 1)) for n in range(sentinels)]
        if replicas:
            wait_for(lambda: all(self._knows_all(each) for each in self.sentinels), "the sentinels know each other and the replicas")

    @property
    def holder(self) -> Server:
        """The first master: without replicas it stays the only one."""
        return self.servers[0]

    def new_name(self) -> str:
        """See `Deployment`."""
        return f"test-{uuid.uuid4().hex[:8]}"

    def url(self, name: str, lease_ms: int) -> str:
        """See `Deployment`."""
        return f"redis+sentinel://{self.places}/main?cluster={name}&lease_ms={lease_ms}"

    @property
    def places(self) -> str:
        """The sentinels as a URL names them."""
        return ",".join(f"127.0.0.1:{self._front_of(sentinel.port)}" for sentinel in self.sentinels)

    def restart(self) -> None:
        """See `Deployment`."""
        self.holder.start()

    def master_port(self) -> int:
        """The port of the master as the first sentinel has it."""
        with self.sentinels[0].client() as client:
            address: Any = client.sentinel_get_master_addr_by_name("main")
            return int(address[1])

    def _sentinel(self, home: Path, master: str, quorum: int) -> Server:
        home.mkdir()

        def argv(port: int) -> Sequence[str]:
            config = home / "sentinel.conf"
            times = {"down-after-milliseconds": 500, "failover-timeout": 1500}
            lines = [f"port {port}", "bind 127.0.0.1", f"dir {home}", f"sentinel monitor main 127.0.0.1 {master} {quorum}"]
            config.write_text("\n".join([*lines, *(f"sentinel {key} main {value}" for key, value in times.items())]) + "\n")
            return [str(server_binary()), str(config), "--sentinel"]

        return Server(home / "log", argv, ready="Sentinel ID is")

    def _knows_all(self, sentinel: Server) -> bool:
        with sentinel.client() as client:
            state: Any = client.sentinel_master("main")
        return int(state["num-other-sentinels"]) == len(self.sentinels) - 1 and int(state["num-slaves"]) == len(self.servers) - 1


class RedisClusterServers(_Closing):
    """Three masters; with `replica` a fourth node follows the second and may take its place.

    Names of clusters are chosen so that the second, which no URL names first, holds the records.
    """

    SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))

    def __init__(self, directory: Path, *, replica: bool = False, front_of: FrontOf = lambda port: port) -> None:
        super().__init__()
        self._fronts: list[int] = []
        count = len(self.SLOTS) + replica
        self.servers = [self._owned(plain_server(directory, f"node{number}", *self._options())) for number in range(count)]
        for server, slots in zip(self.servers, self.SLOTS, strict=False):
            self._fronts.append(front_of(server.port))
            with server.client() as client:
                client.config_set("cluster-announce-port", self._fronts[-1])
                client.execute_command("CLUSTER ADDSLOTSRANGE", *slots)
        for server in self.servers[1:]:
            self._meet(server)
        self._wait()
        if replica:
            self._follow_holder()

    @property
    def holder(self) -> Server:
        """See `Deployment`."""
        return self.servers[1]

    def new_name(self) -> str:
        """See `Deployment`."""
        while True:
            name = f"test-{uuid.uuid4().hex[:8]}"
            if self.SLOTS[1][0] <= key_slot(f"{{kvpool:{name}}}".encode()) <= self.SLOTS[1][1]:
                return name

    def url(self, name: str, lease_ms: int) -> str:
        """See `Deployment`."""
        return f"redis+cluster://{self.places}?cluster={name}&lease_ms={lease_ms}"

    @property
    def places(self) -> str:
        """The nodes as a URL names them."""
        return ",".join(f"127.0.0.1:{port}" for port in self._fronts)

    def restart(self) -> None:
        """See `Deployment`."""
        self.holder.start()
        self._wait()

    def _follow_holder(self) -> None:
        with self.holder.client() as holder, self.servers[3].client() as replica:
            replica.execute_command("CLUSTER REPLICATE", holder.execute_command("CLUSTER MYID").decode())
            wait_for(lambda: replica.info("replication").get("master_link_status") == "up", "the replica follows")

    def _meet(self, server: Server) -> None:
        with self.servers[0].client() as client, server.client() as other:
            bus = other.config_get("cluster-port")["cluster-port"]
            client.execute_command("CLUSTER MEET", "127.0.0.1", server.port, bus)

    @staticmethod
    def _options() -> tuple[str, ...]:
        words = {
            "cluster-enabled": "yes",
            "cluster-port": str(free_port()),
            "cluster-node-timeout": "1000",
            "cluster-config-file": "nodes.conf",
        }
        return tuple(word for name, value in words.items() for word in (f"--{name}", value))

    def _wait(self) -> None:
        wait_for(lambda: all(self._well(server) for server in self.servers), "the Redis Cluster is well")

    def _well(self, server: Server) -> bool:
        with server.client() as client:
            known: Any = client.cluster("INFO")
        return bool(known["cluster_state"] == "ok") and int(known["cluster_known_nodes"]) == len(self.servers)
