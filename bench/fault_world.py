"""A cluster over several hosts, to be hurt: nodes, the membership store, clients at work and a watcher, each in a host of its own."""

import json
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Self

from kvpool.block import Framer, chain_keys
from kvpool.cluster.embedded import server_binary
from kvpool.errors import DeadlineError
from kvpool.policy.placement import PlacedNode, blocks_per_extent, place
from kvpool.testing.hosts import Host, Hosts
from kvpool.testing.load import BLOCK_TOKENS, NAMESPACE, Done, prompt

STORE_PORT, NODE_PORT = 6379, 7000
LEASE_MS = 3000
_START_S = 60.0
_SET = """
import sys
from kvpool.cluster import open_membership
with open_membership(sys.argv[1]) as membership:
    membership.configure(lambda config: config.with_setting(sys.argv[2], sys.argv[3]))
"""


class World:
    """`nodes` pool nodes, clients on the first `clients` of their hosts, one host for the membership store."""

    def __init__(self, *, nodes: int, clients: int, chains: int, rate: float, capacity: str, directory: Path) -> None:
        self.hosts = Hosts(nodes + 2)
        self._store_host = self.hosts[nodes]
        self._spare = self.hosts[nodes + 1]
        self.url = f"redis://{self._store_host.address}:{STORE_PORT}/0?cluster=bench&lease_ms={LEASE_MS}"
        self.ids = [uuid.UUID(int=0x5EED_0000 + number, version=4).hex for number in range(nodes + 1)]
        self._chains, self._rate, self._capacity, self._directory = chains, rate, capacity, directory
        self._clients = clients
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
        self.start_store()
        for number in range(count):
            self.start_node(number)
        self.configure(settings)
        self._follow(
            self._spare, [sys.executable, "-m", "kvpool.testing.watch", "--cluster", self.url, "--seconds", str(seconds)], self._view
        )
        self.wait(lambda: self.states() == {self.ids[n]: "active" for n in range(count)}, "all nodes active")
        ready: list[int] = []
        for number in range(self._clients):
            command = [
                sys.executable,
                "-m",
                "kvpool.testing.load",
                "--pool",
                self.url,
                "--seed",
                str(number + 1),
                "--seconds",
                str(seconds),
            ]
            command += ["--chains", str(self._chains), "--rate", str(self._rate), *(["--fill"] if number == 0 else [])]

            def line(text: str, number: int = number) -> None:
                if text == "ready":
                    ready.append(number)
                else:
                    self.done.append(Done(*json.loads(text)))

            self._follow(self.hosts[number], command, line)
        self.wait(lambda: len(ready) == self._clients, "all clients at work", 2 * _START_S)

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
        """Node `number`, under its own id; empty."""
        host = self.hosts[number]
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
        for name, value in settings.items():
            self._spare.run(sys.executable, "-c", _SET, self.url, name, value)

    def kvpool(self, *words: str) -> str:
        """Run `kvpool` on the spare host; its output."""
        return self._spare.run(sys.executable, "-m", "kvpool.cli", *words, "--cluster", self.url)

    def states(self) -> dict[str, str]:
        """State of each node by id, as last seen by the watcher."""
        return {node_id: state for node_id, (state, _) in self.views[-1]["nodes"].items()} if self.views else {}

    def holders(self, chain: int, copies: int, alive: int) -> set[str]:
        """Ids of the nodes that a request for `chain` concerns while the first `alive` nodes are active."""
        nodes = [PlacedNode(id=node_id) for node_id in self.ids[:alive]]
        return {node_id for one in place(self.keys[chain], blocks_per_extent(BLOCK_TOKENS), nodes, copies) for node_id in one.targets}

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = _START_S) -> float:
        """Wait until `condition()`; seconds that took. `DeadlineError` naming `what`."""
        start = time.monotonic()
        while not condition():
            if time.monotonic() - start > limit_s:
                raise DeadlineError(f"not within {limit_s:.0f} s: {what}; logs are in {self._directory}")
            time.sleep(0.02)
        return time.monotonic() - start

    def _view(self, text: str) -> None:
        self.views.append(json.loads(text))

    def _follow(self, host: Host, command: list[str], line: Callable[[str], None]) -> None:
        process = host.popen(command, stdout=subprocess.PIPE, stderr=self._log(f"{command[2].rpartition('.')[2]}-{host.name}"))
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout, line), daemon=True)
        reader.start()
        self._readers.append(reader)

    def _log(self, name: str) -> IO[str]:
        log = open(self._directory / f"{name}.log", "a")  # noqa: SIM115 - closed with the world
        self._logs.append(log)
        return log


def _read(lines: IO[str], line: Callable[[str], None]) -> None:
    try:
        for text in lines:
            line(text.rstrip("\n"))
    except ValueError:  # closed with its host
        return
