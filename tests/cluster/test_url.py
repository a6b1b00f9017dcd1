"""Cluster URLs."""

import pytest

from kvpool.cluster.url import parse_cluster_url
from kvpool.errors import ConfigError


def test_url_of_one_server_splits_into_place_login_and_cluster() -> None:
    """Everything has its field, percent-encoding undone; the rhythm follows from the lease."""
    url = parse_cluster_url("redis://u:p%40ss%2F@10.0.0.1:6380/2?cluster=prod-1&lease_ms=900")
    assert (url.kind, url.name, url.lease_ms, url.hosts) == ("single", "prod-1", 900, (("10.0.0.1", 6380),))
    assert url.login == {"db": 2, "username": "u", "password": "p@ss/"}
    assert url.tls == {}
    assert (url.beat_s, url.poll_s, url.timeout_s) == (0.3, 0.09, 0.3)


def test_url_defaults_are_the_documented_ones() -> None:
    """Lease 3 s, a heartbeat a second, a look every 0.3 s, database 0, nobody's login."""
    url = parse_cluster_url("redis://[::1]")
    assert (url.name, url.lease_ms, url.beat_s, url.poll_s, url.hosts) == ("default", 3000, 1.0, 0.3, (("::1", 6379),))
    assert url.login == {"db": 0}


def test_url_of_sentinels_has_the_service_and_two_logins() -> None:
    """The sentinels are asked as one user, the master as another."""
    url = parse_cluster_url("redis+sentinel://:pw@s1:1,s2,s3:3/main?cluster=a&db=1&sentinel_username=su&sentinel_password=sp")
    assert (url.kind, url.service, url.hosts) == ("sentinel", "main", (("s1", 1), ("s2", 26379), ("s3", 3)))
    assert url.login == {"db": 1, "username": None, "password": "pw"}
    assert url.sentinel_login == {"username": "su", "password": "sp"}
    assert url.where == "s1:1,s2,s3:3/main"


def test_url_of_a_redis_cluster_names_some_of_its_nodes() -> None:
    """One is enough while it lives, several are better."""
    url = parse_cluster_url("redis+cluster://u:p@n1:1,n2:2?cluster=a")
    assert (url.kind, url.hosts, url.login["username"]) == ("cluster", (("n1", 1), ("n2", 2)), "u")


@pytest.mark.parametrize("place", ["rediss://h:1/0", "rediss+sentinel://h:1/main", "rediss+cluster://h:1"])
def test_url_with_tls_keeps_its_certificates_in_every_deployment(place: str) -> None:
    """The options are spelled alike for one server, Sentinel and Redis Cluster."""
    files = "ssl_ca_certs=/etc/ca.pem&ssl_certfile=/c.pem&ssl_keyfile=/k.pem"
    assert parse_cluster_url(place).tls == {"ssl_check_hostname": True}
    assert parse_cluster_url(f"{place}?{files}&ssl_check_hostname=false").tls == {
        "ssl_check_hostname": False,
        "ssl_ca_certs": "/etc/ca.pem",
        "ssl_certfile": "/c.pem",
        "ssl_keyfile": "/k.pem",
    }


def test_url_with_a_password_file_has_a_user_and_no_password() -> None:
    """What isn't on the command line isn't in the list of processes."""
    url = parse_cluster_url("redis+cluster://u@h:1?password_file=/run/secrets/p")
    assert (url.login, url.password_file) == ({"db": 0, "username": "u"}, "/run/secrets/p")
    assert parse_cluster_url("redis://h:1?password_file=/p").login == {"db": 0, "username": None}


def test_url_of_a_socket_has_a_path() -> None:
    """Of one machine, without a port."""
    url = parse_cluster_url("unix://u:p@/run/redis.sock?cluster=a&db=3")
    assert (url.kind, url.path, url.hosts, url.login["db"], url.login["password"]) == ("unix", "/run/redis.sock", (), 3, "p")


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
        "redis://",
        "redis://h:0/0",
        "redis://h:99999/0",
        "redis://h:1/main",
        "redis://h:1,g:2/0",
        "redis://u@h:1/0",
        "redis://u:p@h:1?password_file=/p&cluster=a",
        "redis://u@h:1?password_file=&cluster=a",
        "redis+sentinel://h:1",
        "redis+sentinel://h:1/a/b",
        "redis+sentinel://h:1,/main",
        "redis+sentinel://h:1/main?db=x",
        "redis+sentinel://h:1/main?sentinel_username=u",
        "redis+cluster://h:1/1",
        "redis+cluster://h:1?db=1",
        "redis+cluster://" + ",".join(f"h{number}" for number in range(65)),
        "rediss://h:1/0?ssl_certfile=c.pem",
        "rediss://h:1/0?ssl_check_hostname=no",
        "unix://host/run/redis.sock",
        "unix://",
    ],
)
def test_url_that_is_wrong_is_refused_with_a_reason(url: str) -> None:
    """A mistake in a URL must not turn into a default."""
    with pytest.raises(ConfigError, match=r"cluster|lease_ms"):
        parse_cluster_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://u:s3cret@h:1/0?cluster=a",
        "redis://u:s3cret@h:x/0",
        "redis://u:s3cret@h:1/0?cluster=a%20b",
        "redis+sentinel://u:s3cret@h:1/main?sentinel_password=s3cret&nonsense=1",
        "redis+sentinel://u:s3cret@h:1",
    ],
)
def test_url_refused_tells_no_secret(url: str) -> None:
    """Messages end in logs."""
    with pytest.raises(ConfigError) as refused:
        parse_cluster_url(url)
    assert "s3cret" not in str(refused.value)


def test_url_accepted_tells_no_secret() -> None:
    """Neither printed nor as the place in a message."""
    url = parse_cluster_url("redis+sentinel://u:s3cret@h:1/main?sentinel_username=u&sentinel_password=s3cret")
    assert "s3cret" not in repr(url)
    assert url.where == "h:1/main"
