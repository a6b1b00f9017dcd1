"""The embedded server: found without importing its package, on loopback, on a port that is really ours, gone at the end."""

import importlib.util
import socket
from pathlib import Path
from typing import Any

import pytest
import redis

from kvpool.cluster import embedded
from kvpool.cluster.child import Child
from kvpool.cluster.embedded import EmbeddedServer, server_binary
from kvpool.cluster.url import parse_cluster_url
from kvpool.errors import ConfigError, DeadlineError, UnavailableError
from kvpool.testing.membership_kit import eventually


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_embedded_answers_when_start_returns_and_is_gone_after_close(tmp_path: Path) -> None:
    """`start` has waited for the answer, and `close` for the end; nothing is written but the log."""
    with EmbeddedServer.start(tmp_path, cluster="c") as server:
        url = parse_cluster_url(server.url)
        assert url.name == "c"
        client = redis.Redis(*url.hosts[0])
        assert client.ping()
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        client.close()
    assert not _accepts(server.port)
    assert [path.name for path in tmp_path.iterdir()] == ["valkey.log"]


def test_embedded_on_a_port_taken_in_between_tries_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between choosing a port and binding it anybody may take it, even another such server."""
    with EmbeddedServer.start(tmp_path / "first") as first:
        free = embedded._free_port()
        ports = iter([first.port, first.port, free])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(ports))
        with EmbeddedServer.start(tmp_path / "second") as second:
            assert second.port == free
            assert second.pid != first.pid


def test_embedded_on_a_given_port_that_is_taken_is_unavailable(tmp_path: Path) -> None:
    """A port that was asked for is never exchanged for another."""
    with EmbeddedServer.start(tmp_path / "first") as first, pytest.raises(UnavailableError, match=r"valkey\.log"):
        EmbeddedServer.start(tmp_path / "second", port=first.port)


def test_embedded_that_never_answers_is_stopped_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the start ends, and leaves no process."""
    started: list[Child] = []

    def hang(binary: Path, directory: Path, port: int) -> list[str]:
        return ["sleep", "600"]

    def spy(*args: Any, **options: Any) -> Child:
        started.append(Child(*args, **options))
        return started[-1]

    monkeypatch.setattr(embedded, "server_argv", hang)
    monkeypatch.setattr(embedded, "Child", spy)
    with pytest.raises(DeadlineError):
        EmbeddedServer.start(tmp_path, timeout_s=0.2)
    assert [child.exit_code is not None for child in started] == [True]


def test_embedded_killed_and_started_again_on_the_same_port(tmp_path: Path) -> None:
    """A restarted server is where its clients look for it."""
    with EmbeddedServer.start(tmp_path) as first:
        first.kill()
        eventually(lambda: not _accepts(first.port), "the first is gone")
        with EmbeddedServer.start(tmp_path, port=first.port) as second:
            assert second.url == first.url


def test_embedded_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra that brings the server is named, and so is the way without it."""
    assert server_binary().is_file()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kvpool\[local\].*--cluster"):
        server_binary()
