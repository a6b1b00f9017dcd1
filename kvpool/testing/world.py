"""A cluster over several hosts, to be hurt: nodes, the membership store, clients at work and a watcher, each in a host of its own."""

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, Self

from kvpool.block import Framer, chain_keys
from kvpool.cluster.embedded import server_binary
from kvpool.errors import DeadlineError
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.testing.hosts import Host, Hosts
from kvpool.testing.load import BLOCK_TOKENS, DEADLINE_S, NAMESPACE, Done, prompt

STORE_PORT, NODE_PORT = 6379, 7000
LEASE_MS = 3000
_START_S = 60.0
_CALL_S = 30.0
_SET = """
import sys
from kvpool.cluster import open_membership
with open_membership(sys.argv[1]) as membership:
    for setting in sys.argv[2:]:
        membership.configure(lambda config: config.with_setting(*setting.split("=")))
"""


class World:
    """`nodes` pool nodes, clients on the first `clients` of their hosts, a host for the membership store and a spare one, where the watcher
    runs and one more node may join.

    `rate`: requests a second of each client; `deadline_s`: how long one may take; `chains`: prompts that they share.
    """

    def __init__(
        self, *, nodes: int, clients: int, chains: int, rate: float, capacity: str, directory: Path, deadline_s: float = DEADLINE_S
    ) -> None:
        self.hosts = Hosts(nodes + 2)
        self._store_host = self.hosts[nodes]
        self._spare = self.hosts[nodes + 1]
        self.url = f"redis://{self._store_host.address}:{STORE_PORT}/0?cluster=bench&lease_ms={LEASE_MS}"
        self.ids = [uuid.UUID(int=0x5EED_0000 + number, version=4).hex for number in range(nodes + 1)]
        self._node_hosts = [*(self.hosts[number] for number in range(nodes)), self._spare]
        self._flags = ["--chains", str(chains), "--rate", str(rate), "--deadline", str(deadline_s)]
        self._capacity, self._directory = capacity, directory
        self._clients = clients
        self._working: list[subprocess.Popen[str]] = []
        self._logs: list[IO[str]] = []
        self._nodes: dict[int, subprocess.Popen[str]] = {}
        self._readers: list[threading.Thread] = []
        self.done: list[Done] = []
        self.views: list[dict[str, Any]] = []
        self.keys = [chain_keys(Framer(NAMESPACE).root, prompt(number), BLOCK_TOKENS) for number in range(chains)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        self.hosts.close()
        for reader in self._readers:
            reader.join(5)
        for log in self._logs:
            log.close()

    def start(self, count: int, seconds: float, *, settings: dict[str, str]) -> None:
        """The store, `count` nodes, the cluster's settings, a watcher; then the clients, which fill the pool and go to work."""
        life = ["--seconds", str(seconds)]
        self.start_store()
        for number in range(count):
            self.start_node(number)
        self._follow(self._spare, "watch", ["--cluster", self.url, *life], lambda text: self.views.append(json.loads(text)))
        self.configure(settings)
        self.wait(lambda: self.states() == dict.fromkeys(self.ids[:count], "active"), "all nodes active")
        ready: list[str] = []

        def line(text: str) -> None:
            if text == "ready":
                ready.append(text)
            else:
                self.done.append(Done(*json.loads(text)))

        for number in range(self._clients):
            flags = ["--pool", self.url, "--seed", str(number + 1), *life, *self._flags, *(["--fill"] if number == 0 else [])]
            self._working.append(self._follow(self.hosts[number], "load", flags, line))
        self.wait(lambda: len(ready) == self._clients, "all clients at work", 2 * _START_S)

    def rest(self) -> None:
        """End the clients, in the middle of what they do."""
        for process in self._working:
            process.kill()
            process.wait()

    def start_store(self) -> None:
        """The membership store, empty."""
        host, options = self._store_host, "--save  --appendonly no --protected-mode no"
        command = [str(server_binary()), "--bind", host.address, "--port", str(STORE_PORT), "--dir", str(self._directory)]
        self._store = host.popen([*command, *options.split(" ")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill_store(self) -> None:
        """`kill -9` of the store; nothing of it is kept."""
        self._store.kill()
        self._store.wait()

    def start_node(self, number: int) -> None:
        """Node `number`, under its own id; empty. The last number is that of the spare host."""
        host = self._node_hosts[number]
        command = [sys.executable, "-m", "kvpool.node", "--listen", f"{host.address}:{NODE_PORT}", "--cluster", self.url]
        command += ["--capacity", self._capacity, "--id", self.ids[number]]
        self._nodes[number] = host.popen(command, stderr=self._log(f"node-{number}"))

    def signal_node(self, number: int, what: signal.Signals) -> None:
        """Send a signal to a node; SIGTERM and SIGKILL are waited for."""
        process = self._nodes[number]
        process.send_signal(what)
        if what in (signal.SIGKILL, signal.SIGTERM):
            process.wait(60)

    def configure(self, settings: dict[str, str]) -> None:
        """Set the cluster's settings."""
        self._spare.run(sys.executable, "-c", _SET, self.url, *(f"{name}={value}" for name, value in settings.items()), limit_s=_CALL_S)

    def kvpool(self, *words: str, limit_s: float = _CALL_S) -> Any:
        """Run `kvpool` on the spare host; what it said as JSON. Raises `ConfigError` when it ends with another code than 0."""
        return json.loads(self._spare.run(sys.executable, "-m", "kvpool.cli", *words, "--json", "--cluster", self.url, limit_s=limit_s))

    def books(self) -> dict[str, dict[str, Any]]:
        """What each node says of itself, by id, as `kvpool nodes --json` tells it. Raises `ConfigError` when one doesn't answer."""
        return {node["id"]: node for node in self.kvpool("nodes")}

    def states(self) -> dict[str, str]:
        """State of each node by id, as last seen by the watcher."""
        return {node_id: state for node_id, (state, _) in self.views[-1]["nodes"].items()} if self.views else {}

    def holders(self, chain: int, copies: int, active: Sequence[str]) -> set[str]:
        """Ids of the nodes that a request for `chain` concerns while the nodes `active` are."""
        nodes = [PlacedNode(id=node_id) for node_id in active]
        return {node_id for one in place(self.keys[chain], blocks_per_extent(BLOCK_TOKENS), nodes, copies) for node_id in one.targets}

    def work(self, count: int) -> list[Done]:
        """The next `count` requests that begin from now on, or a few more, once they have ended."""
        start_ns = time.monotonic_ns()
        self.wait(lambda: sum(one.at_ns >= start_ns for one in tuple(self.done)) >= count, f"{count} more requests")
        return [one for one in tuple(self.done) if one.at_ns >= start_ns]

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = _START_S) -> float:
        """Wait until `condition()`; seconds that took. `DeadlineError` naming `what`."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > limit_s:
                raise DeadlineError(f"not within {limit_s:.0f} s: {what}; logs are in {self._directory}")
            time.sleep(0.02)
        return time.monotonic() - start

    def _follow(self, host: Host, program: str, flags: Sequence[str], line: Callable[[str], None]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", f"kvpool.testing.{program}", *flags]
        process = host.popen(command, stdout=subprocess.PIPE, stderr=self._log(f"{program}-{host.name}"))
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, line), daemon=True)
        reader.start()
        self._readers.append(reader)
        return process

    def _log(self, name: str) -> IO[str]:
        log = open(self._directory / f"{name}.log", "a")  # noqa: SIM115 - closed with the world
        self._logs.append(log)
        return log


def _read(lines: IO[str], line: Callable[[str], None]) -> None:
    try:
        for text in lines:
            if text.endswith("\n"):  # not what somebody said when it was killed
                line(text.rstrip("\n"))
    except ValueError:  # closed with its host
        return
