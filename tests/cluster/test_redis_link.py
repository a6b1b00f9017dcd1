"""The link: when it tries again, whom it asks first, and how long all of them together may take."""

import socket
from typing import Any

import pytest
import redis

from kvpool.cluster.redis_link import Link
from kvpool.cluster.url import parse_cluster_url

URL = parse_cluster_url("redis://127.0.0.1:9/0?cluster=a")


class Ask:
    """Fails with each of `errors` in turn, then succeeds; counts."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.count = 0

    def __call__(self, client: redis.Redis) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


def test_link_that_worked_before_tries_once_more_on_a_new_connection() -> None:
    """A server that was restarted between two calls costs nothing; the change of connection shows."""
    link, ask = Link(URL), Ask(redis.ConnectionError(), redis.ConnectionError(), redis.ConnectionError())
    assert link.call(Ask()) == "answer"
    assert link.generation == 1
    with pytest.raises(redis.ConnectionError):
        link.call(ask)
    assert (ask.count, link.generation) == (2, 2)
    with pytest.raises(redis.ConnectionError):
        link.call(ask)
    assert ask.count == 3
    assert link.call(ask) == "answer"
    assert link.generation == 4
    assert link.call(ask) == "answer"
    assert link.generation == 4


def test_link_after_a_silence_does_not_ask_again_at_once() -> None:
    """Or each call would wait twice as long for a server that hangs."""
    link, ask = Link(URL), Ask(redis.TimeoutError())
    link.call(Ask())
    with pytest.raises(redis.TimeoutError):
        link.call(ask)
    assert ask.count == 1


def test_link_told_that_the_server_is_not_the_one_finds_another() -> None:
    """A master that became a replica, or a node that gave the slot away, answers with an error: reason enough to look anew."""
    for error in (redis.ReadOnlyError("You can't write against a read only replica."), redis.exceptions.MovedError("7 127.0.0.1:1")):
        link, ask = Link(parse_cluster_url("redis+cluster://127.0.0.1:9?cluster=a")), Ask(error)
        link._find = lambda: ("127.0.0.1", 9)  # type: ignore[method-assign]
        link.call(Ask())
        assert link.call(ask) == "answer"
        assert (ask.count, link.generation) == (2, 2)


@pytest.mark.parametrize("place", ["redis+sentinel://127.0.0.1:{},127.0.0.1:{}/main", "redis+cluster://127.0.0.1:{},127.0.0.1:{}"])
def test_link_asks_all_hosts_within_one_timeout_and_the_helpful_one_first(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are silent, a call is over in time for the next heartbeat, and the second search doesn't wait for them again."""
    asked: list[tuple[int, float]] = []
    make = Link._client_of

    def spy(self: Link, host: tuple[str, int], timeout_s: float, login: dict[str, Any]) -> redis.Redis:
        asked.append((host[1], timeout_s))
        return make(self, host, timeout_s, login)

    monkeypatch.setattr(Link, "_client_of", spy)
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as helpful:
        ports = [server.getsockname()[1] for server in (silent, helpful)]
        url = parse_cluster_url(place.format(*ports) + ("&" if "?" in place else "?") + "lease_ms=300")
        link = Link(url)
        monkeypatch.setattr(Link, "_ask_sentinel", lambda self, client: self._ask_node(client, ("", 0)))

        def know(self: Link, client: redis.Redis, host: tuple[str, int]) -> tuple[str, int]:
            if client.connection_pool.connection_kwargs["port"] == ports[0]:
                client.ping()  # nobody accepts: this times out
            return "127.0.0.1", ports[1]

        monkeypatch.setattr(Link, "_ask_node", know)
        link.call(Ask())
        link.close()
        link.call(Ask())
    assert [port for port, _ in asked] == [ports[0], ports[1], ports[1], ports[1], ports[1]]
    assert sum(timeout_s for _, timeout_s in asked[:2]) == url.timeout_s


def test_link_that_finds_nobody_says_what_each_answered() -> None:
    """The reason is in the error, host by host."""
    link = Link(parse_cluster_url("redis+sentinel://127.0.0.1:9,127.0.0.1:10/main"))
    with pytest.raises(redis.ConnectionError, match=r"127\.0\.0\.1:9: .*refused.*; 127\.0\.0\.1:10: .*refused"):
        link.call(Ask())
