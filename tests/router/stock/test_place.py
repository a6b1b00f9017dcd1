"""What `--engine` takes."""

from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from router.stock.place import EnginePlace


def test_url_alone_is_an_engine() -> None:
    """Its events are found by asking it."""
    place = EnginePlace.parse("http://10.0.0.7:8000")
    assert (place.address, place.tls, place.events, place.model) == ("10.0.0.7:8000", False, "", "")
    assert EnginePlace.parse("http://10.0.0.7:8000/v1").id == place.id == EnginePlace.parse("http://10.0.0.7:8000/").id
    assert EnginePlace.parse("https://10.0.0.7:8000").id != place.id
    assert EnginePlace.parse("https://e.example").address == "e.example:443"
    assert EnginePlace.parse("http://[::1]:80").address == "[::1]:80"


def test_options_follow_the_url() -> None:
    """Where its events are when it doesn't say, and what it wants to see."""
    place = EnginePlace.parse("http://e:1,events=tcp://e:2,replay=ipc:///run/r,topic=kv,model=org/m,key=/k")
    assert (place.events, place.replay, place.topic, place.model, place.key) == ("tcp://e:2", "ipc:///run/r", "kv", "org/m", Path("/k"))


@pytest.mark.parametrize(
    "text",
    [
        "e:1",
        "ftp://e:1",
        "http://",
        "http://e:99999",
        "http://e:1/path",
        "http://me:pw@e:1",
        "http://e:1,events",
        "http://e:1,events=",
        "http://e:1,colour=red",
        "http://e:1,topic=a,topic=b",
        "http://e:1,events=tcp://*:5",
        "http://e:1,events=udp://e:5",
        "http://e:1,replay=tcp://e:5",
    ],
)
def test_what_is_no_engine_is_refused(text: str) -> None:
    """At the start, with a message, and not at the first request."""
    with pytest.raises(ConfigError, match="engine"):
        EnginePlace.parse(text)


@pytest.mark.parametrize(
    ("bound", "found"),
    [
        ("tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "tcp://10.0.0.7:5557"),
        ("tcp://10.9.9.9:5557", "tcp://10.9.9.9:5557"),
        ("ipc:///run/kv", "ipc:///run/kv"),
    ],
)
def test_wildcard_of_an_engine_is_its_host(bound: str, found: str) -> None:
    """An engine says what it has bound, not where others find it."""
    assert EnginePlace.parse("http://10.0.0.7:8000").reach(bound) == found
