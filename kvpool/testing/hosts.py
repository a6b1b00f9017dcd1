"""Several hosts on one machine, for tests that cut, slow and kill: each with its own network, /dev/shm, name and boot id.

A host is a process in namespaces of its own that does nothing but hold them; others are started inside it. The hosts hang on a bridge that
has a namespace too, so nothing is left in this machine's own network, and when the holders end everything is gone. Since `/dev/shm` and
the boot id differ, programs tell such hosts apart as they would tell real ones.

    with Hosts(3) as hosts:
        process = hosts[0].popen(["python", "-m", "kvpool.node", "--listen", f"{hosts[0].address}:7000"])
        hosts.cut(hosts[1], hosts[0])  # packets from 1 to 0 vanish; those from 0 to 1 still arrive

Needs root and the programs unshare, nsenter, ip and tc (packages util-linux and iproute2).
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

from kvpool.errors import ConfigError

_PROGRAMS = ("unshare", "nsenter", "ip", "tc", "mount")
_CALL_S = 20
_MAX_HOSTS = 200
_NOWHERE = "02:00:00:00:00:fe"  # a locally administered hardware address that nobody has
_LIFE_S = 7200
_BOOT_ID = "/proc/sys/kernel/random/boot_id"


def unsupported() -> str | None:
    """Why hosts can't be made here; None when they can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found; install util-linux and iproute2"
    probe = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True, timeout=_CALL_S)
    return None if probe.returncode == 0 else f"the kernel refuses namespaces: {probe.stderr.strip()}"


class _Holder:
    """A process that holds namespaces until it is closed. `setup` is run inside them first."""

    def __init__(self, flags: Sequence[str], setup: str) -> None:
        script = f"set -e\n{setup}\necho ready\nexec sleep {_LIFE_S}"
        self.process = subprocess.Popen(
            ["unshare", *flags, "--kill-child", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline().strip() != "ready":
            raise ConfigError(f"can't make a host: {self.close()}")
        self.pid = self.process.pid

    def close(self) -> str:
        """End it; what it had to say."""
        self.process.kill()
        _, said = self.process.communicate(timeout=_CALL_S)
        return said.strip()


class Host:
    """One host. `address`: its IPv4 address; `name`: h1, h2, …"""

    def __init__(self, number: int, directory: Path) -> None:
        self.number = number
        self.name = f"h{number}"
        self.address = f"10.88.0.{number}"
        boot_id = directory / self.name
        boot_id.write_text(f"{uuid.uuid4()}\n")
        setup = f"mount -t tmpfs tmpfs /dev/shm\nmount --bind {boot_id} {_BOOT_ID}\necho {self.name} > /proc/sys/kernel/hostname"
        self._holder = _Holder(["--net", "--mount", "--uts"], setup)
        self.pid = self._holder.pid
        self._started: list[subprocess.Popen[Any]] = []

    def argv(self, command: Sequence[str]) -> list[str]:
        """`command` as one that runs inside this host."""
        return ["nsenter", "-t", str(self.pid), "-n", "-m", "-u", "--", *command]

    def popen(
        self,
        command: Sequence[str],
        *,
        stdin: int | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start `command` inside, text in and out. nsenter becomes the command: its pid is the program's. Killed when the host ends."""
        process = subprocess.Popen(self.argv(command), stdin=stdin, stdout=stdout, stderr=stderr, text=True)
        self._started.append(process)
        return process

    def run(self, *command: str, limit_s: float = _CALL_S) -> str:
        """Run a command inside; its output. Raises `ConfigError` when it fails or takes longer than `limit_s`."""
        return _run(self.argv(command), limit_s)

    def close(self) -> None:
        """Kill what was started here and let the host go."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for process in self._started:
            process.wait(_CALL_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._holder.close()


class Hosts:
    """`count` hosts on one bridge; a context manager and a sequence. Raises `ConfigError` where they can't be made."""

    def __init__(self, count: int) -> None:
        reason = unsupported()
        if reason is not None:
            raise ConfigError(f"can't make hosts: {reason}")
        if not 1 <= count <= _MAX_HOSTS:
            raise ConfigError(f"a number of hosts is 1 to {_MAX_HOSTS}, got {count}")
        self._stack = contextlib.ExitStack()
        with contextlib.ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvpool-hosts-")))
            switch = _Holder(["--net"], "ip link add br0 type bridge\nip link set br0 up")
            stack.callback(switch.close)
            self._hosts: list[Host] = []
            for number in range(1, count + 1):
                host = Host(number, directory)
                stack.callback(host.close)
                self._hosts.append(host)
                port = f"p{number}"
                inside = ["nsenter", "-t", str(switch.pid), "-n", "--", "ip", "link"]
                _run([*inside, "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid)])
                _run([*inside, "set", port, "master", "br0", "up"])
                host.run("ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
                host.run("ip", "link", "set", "lo", "up")
                host.run("ip", "link", "set", "eth0", "up")
            self._stack = stack.pop_all()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def cut(self, source: Host, target: Host) -> None:
        """Let packets from `source` to `target` vanish, silently; the other direction is a cut of its own."""
        source.run("ip", "neigh", "replace", target.address, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")

    def heal(self, source: Host, target: Host) -> None:
        """End a cut."""
        source.run("ip", "neigh", "del", target.address, "dev", "eth0")

    def slow(self, host: Host, mbit_per_s: int) -> None:
        """Limit what `host` sends."""
        host.run("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "64kb", "latency", "400ms")

    def fast(self, host: Host) -> None:
        """End a limit."""
        host.run("tc", "qdisc", "del", "dev", "eth0", "root")

    def close(self) -> None:
        """End all hosts and what runs in them."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _run(argv: Sequence[str], limit_s: float = _CALL_S) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{' '.join(argv)}: not done within {limit_s:.0f} s") from None
    if done.returncode:
        raise ConfigError(f"{' '.join(argv)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
