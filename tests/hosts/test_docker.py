"""Three nodes, the membership store and clients, each in a container of its own: one that is killed costs nothing, not even a hit.

Containers differ from hosts in namespaces: they share the machine's boot id and not its /dev/shm, learn their address when they start, and
find each other by name. The image is made by tests/hosts/images.sh; without it, or without a Docker engine, these tests are skipped.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.network import Network

from kvpool.testing.load import Done

IMAGE = os.environ.get("KVPOOL_TEST_IMAGE", "local/kvpool:test")
MAKE_IT = "tests/hosts/images.sh makes it"
URL = "redis://store:6379/0?cluster=docker&lease_ms=3000"
NODE = f"exec python -m kvpool.node --listen $(hostname -i):7000 --cluster '{URL}' --capacity 64MiB"
LOAD = f"exec python -m kvpool.testing.load --pool '{URL}' --seconds 200 --chains 12 --rate 10 --deadline 15"
REQUESTS = 30
LIMIT_S = 60


def unsupported() -> str | None:
    """Why the containers can't be started here; None when they can."""
    install = "apt-get install --no-install-recommends docker.io iptables debootstrap, and start dockerd"
    if shutil.which("docker") is None:
        return f"no Docker; {install}"
    for words, reason in (
        (["version"], f"no Docker engine answers; {install}"),
        (["image", "inspect", IMAGE], f"no image {IMAGE}; {MAKE_IT}"),
    ):
        if subprocess.run(["docker", *words], capture_output=True, timeout=LIMIT_S).returncode:
            return reason
    return None


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition()`; fails naming `what`."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.1)


class Containers:
    """A cluster on a network of its own; gone with all it made when `stack` is."""

    def __init__(self, stack: ExitStack) -> None:
        testcontainers_config.ryuk_disabled = True  # its image would come from a registry
        self._stack = stack
        self._network = stack.enter_context(Network())
        self._store = self._start("store", "exec redis-server --bind 0.0.0.0 --protected-mode no --save '' --appendonly no")
        self.nodes = [self._start(f"node-{number}", NODE) for number in range(3)]
        wait(lambda: self.states() == ["active"] * 3, "three active nodes")
        for setting in (("copies", "2"), ("near_copies", "false")):
            self.kvpool("config", "set", *setting)
        self._loads = [self._start("load-0", f"{LOAD} --seed 1 --fill"), self._start("load-1", f"{LOAD} --seed 2")]
        wait(lambda: all(lines[:1] == ["ready"] for lines in self._lines()), "clients at work")

    def _start(self, name: str, script: str) -> Any:
        made = DockerContainer(IMAGE).with_command(["sh", "-c", script]).with_network(self._network).with_network_aliases(name)
        return self._stack.enter_context(made.with_kwargs(shm_size="256m")).get_wrapped_container()

    def kvpool(self, *words: str) -> Any:
        """Run `kvpool` beside the store; what it says as JSON, None when it fails."""
        code, output = self._store.exec_run(["kvpool", *words, "--json", "--cluster", URL], demux=True)
        return json.loads(output[0]) if code == 0 else None

    def states(self) -> list[str]:
        """States of the nodes, once all answer."""
        return [node["state"] for node in self.kvpool("nodes") or []]

    def _lines(self) -> list[list[str]]:
        said = [load.logs(stdout=True, stderr=False).decode() for load in self._loads]
        return [text[: text.rfind("\n") + 1].splitlines() for text in said]

    def done(self) -> list[Done]:
        """All requests so far."""
        return [Done(*json.loads(line)) for lines in self._lines() for line in lines[1:]]

    def work(self) -> list[Done]:
        """A number of requests that begin from now on, once they have ended."""
        start_ns = time.monotonic_ns()  # one machine, one clock
        wait(lambda: sum(one.at_ns >= start_ns for one in self.done()) >= REQUESTS, f"{REQUESTS} more requests")
        return [one for one in self.done() if one.at_ns >= start_ns]


@pytest.fixture(scope="module")
def containers() -> Iterator[Containers]:
    reason = unsupported()
    if reason is not None:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield Containers(stack)


def test_docker_kill_of_a_node_costs_nothing_not_even_a_hit(containers: Containers) -> None:
    """Two copies: no wrong byte, no failed request, no miss, before and after anybody knows, nor when the container is started again."""
    done = containers.work()
    containers.nodes[1].kill()
    done += containers.work()
    wait(lambda: containers.states() == ["active"] * 2, "the others do without it")
    done += containers.work()
    containers.nodes[1].start()
    wait(lambda: containers.states() == ["active"] * 3, "it is back")
    done += containers.work()
    assert [(one.wrong, one.error) for one in done if one.wrong or one.error] == []
    assert [one for one in done if one.hit < one.total] == []
