"""Cluster URLs."""

import pytest

from kvpool.cluster.membership import parse_cluster_url
from kvpool.errors import ConfigError


def test_url_redis_splits_server_from_cluster() -> None:
    """What concerns kvpool is not passed on to the client library."""
    url = parse_cluster_url("redis://u:p@10.0.0.1:6379/0?cluster=prod-1&lease_ms=900")
    assert (url.name, url.lease_ms, url.server) == ("prod-1", 900, "redis://u:p@10.0.0.1:6379/0")
    assert (url.beat_s, url.poll_s) == (0.3, 0.09)


def test_url_defaults_give_the_documented_rhythm() -> None:
    """Lease 3 s, a heartbeat a second, a look every 0.3 s."""
    url = parse_cluster_url("redis://127.0.0.1:6379/0")
    assert (url.name, url.lease_ms, url.beat_s, url.poll_s) == ("default", 3000, 1.0, 0.3)


def test_url_rediss_keeps_its_certificates() -> None:
    """TLS options reach the client library."""
    url = parse_cluster_url("rediss://h:1/0?ssl_ca_certs=/etc/ca.pem&cluster=a")
    assert url.server == "rediss://h:1/0?ssl_ca_certs=%2Fetc%2Fca.pem"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:6379",
        "http://x",
        "memory://",
        "memory://a/b",
        "memory://a?x=1",
        "memory://a b",
        "redis://h:1/0?cluster=",
        "redis://h:1/0?cluster=a%20b",
        "redis://h:1/0?cluster=" + "a" * 65,
        "redis://h:1/0?lease_ms=fast",
        "redis://h:1/0?lease_ms=1",
        "redis://h:1/0?retry=1",
        "redis://h:1/0?ssl_ca_certs=x",
    ],
)
def test_url_that_is_wrong_is_refused_with_a_reason(url: str) -> None:
    """A mistake in a URL must not turn into a default."""
    with pytest.raises(ConfigError, match=r"cluster|lease_ms"):
        parse_cluster_url(url)
