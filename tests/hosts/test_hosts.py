"""Hosts made of namespaces: apart in every way that kvpool looks at, reachable until they are cut."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from kvpool.errors import ConfigError
from kvpool.testing.hosts import Host, Hosts, unsupported

pytestmark = pytest.mark.skipif(unsupported() is not None, reason=f"no hosts here: {unsupported()}")

SERVER = """
import socket, sys
server = socket.create_server(("0.0.0.0", 7000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(1 << 16):
            peer.sendall(data[:1])
"""
ASK = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 7000), timeout=1) as peer:
        peer.sendall(b"x" * int(sys.argv[2]))
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(1 << 16):
            pass
except TimeoutError:
    print("silence")
else:
    print("answered")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        server = made[0].popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        assert server.stdout is not None
        assert server.stdout.readline() == "up\n"
        yield made


def ask(host: Host, target: Host, nbytes: int = 1) -> str:
    return host.run(sys.executable, "-c", ASK, target.address, str(nbytes)).strip()


def test_each_has_a_network_a_name_a_boot_id_and_shared_memory_of_its_own(hosts: Hosts) -> None:
    """What tells real hosts apart must tell these apart, or tests over them would quietly share memory."""
    hosts[1].run("touch", "/dev/shm/only-here")
    assert [hosts[n].run("ls", "/dev/shm").split() for n in range(3)] == [[], ["only-here"], []]
    assert len({hosts[n].run("cat", "/proc/sys/kernel/random/boot_id") for n in range(3)}) == 3
    assert [hosts[n].run("hostname").strip() for n in range(3)] == ["h1", "h2", "h3"]
    assert "10.88.0.2" in hosts[1].run("ip", "-4", "addr", "show", "eth0")


def test_a_cut_is_silent_has_one_direction_and_heals(hosts: Hosts) -> None:
    """A partition that answers 'unreachable' would be noticed at once; a real one is silent."""
    assert [ask(hosts[1], hosts[0]), ask(hosts[2], hosts[0])] == ["answered", "answered"]
    hosts.cut(hosts[1], hosts[0])
    assert [ask(hosts[1], hosts[0]), ask(hosts[2], hosts[0])] == ["silence", "answered"]
    hosts.heal(hosts[1], hosts[0])
    assert ask(hosts[1], hosts[0]) == "answered"
    hosts.cut(hosts[0], hosts[1])  # the answers vanish
    assert ask(hosts[1], hosts[0]) == "silence"
    hosts.heal(hosts[0], hosts[1])
    assert ask(hosts[1], hosts[0]) == "answered"


def test_a_slow_host_sends_no_faster_than_told(hosts: Hosts) -> None:
    """A slow link that isn't slow proves nothing about what waits for it."""
    hosts.slow(hosts[1], 8)  # a megabyte a second
    start = time.monotonic()
    assert ask(hosts[1], hosts[0], 600_000) == "answered"
    assert time.monotonic() - start > 0.4  # 600 kB at a megabyte a second: a busy machine only makes it longer
    hosts.fast(hosts[1])
    assert ask(hosts[1], hosts[0], 600_000) == "answered"


def test_everything_that_ran_inside_ends_with_the_hosts() -> None:
    """A test that fails half way must leave no process behind."""
    with Hosts(1) as made:
        process = made[0].popen(["sleep", "600"])
        assert process.poll() is None
    assert process.poll() is not None


def test_a_number_of_hosts_that_makes_no_sense_is_refused() -> None:
    """The mistake is told before any namespace is made."""
    with pytest.raises(ConfigError, match="1 to 200"):
        Hosts(0)
