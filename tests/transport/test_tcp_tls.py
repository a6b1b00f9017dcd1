"""The TCP data plane behind certificates: nothing in the clear, nobody unknown."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import AccessError, ConfigError, DeadlineError, KvpoolError, UnavailableError
from kvpool.security.tls import client_context, server_context
from kvpool.testing.certificates import Authority, Pair
from kvpool.testing.reach_kit import noise
from kvpool.transport import Run
from kvpool.transport.tcp import TcpReach
from kvpool.units import MIB
from tests.transport.tcp_rig import EMPTY, FRAME, Rig, ended, key, served, soon


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def pair(authority: Authority) -> Pair:
    return authority.sign("node")


@pytest.fixture
def rig(authority: Authority, pair: Pair) -> Iterator[Rig]:
    with served(tls=server_context(pair.cert, pair.key, authority.cert, mutual=False)) as made:
        yield made


@pytest.fixture
def mutual(authority: Authority, pair: Pair) -> Iterator[Rig]:
    with served(tls=server_context(pair.cert, pair.key, authority.cert, mutual=True)) as made:
        yield made


def works(reach: TcpReach) -> bool:
    """Frames, runs, and what was written."""
    payload, into = np.zeros(FRAME, np.uint8), np.zeros(3 * MIB, np.uint8)
    assert reach.get([(key(9), 5, EMPTY, np.zeros(5, np.uint8)), (key(1), FRAME, EMPTY, payload)], soon()) == [False, True]
    assert (payload == 2).all()
    written = noise(3 * MIB, 4)
    reach.write([Run(8 * MIB + 1, 2 * MIB, 7), Run(12 * MIB, 1000, 0)], written, lease_id=0, deadline_ns=soon())
    reach.read([Run(12 * MIB, 1000, 2 * MIB), Run(8 * MIB + 1, 2 * MIB, 0)], into, lease_id=0, deadline_ns=soon())
    return np.array_equal(into[: 2 * MIB], written[7 : 2 * MIB + 7]) and np.array_equal(into[2 * MIB : 2 * MIB + 1000], written[:1000])


def test_everything_works_through_tls(rig: Rig, authority: Authority) -> None:
    """In pieces of any size, many records each."""
    assert works(rig.open(tls=client_context(authority.cert, None, None)))


def test_nothing_is_served_in_the_clear(rig: Rig, authority: Authority) -> None:
    """A client without TLS learns nothing, one that wants TLS doesn't go on without."""
    with pytest.raises((AccessError, UnavailableError)):
        rig.open()
    assert b"KVPB" not in ended(rig.dial(b"KVPT" + bytes(28)))
    with served() as plain, pytest.raises((AccessError, UnavailableError)):
        plain.open(tls=client_context(authority.cert, None, None))
    assert works(rig.open(tls=client_context(authority.cert, None, None)))


def test_certificate_of_somebody_else_is_refused(rig: Rig, authority: Authority, tmp_path: Path) -> None:
    """Another authority, or another name."""
    with pytest.raises(AccessError):
        rig.open(tls=client_context(Authority(tmp_path, "other").cert, None, None))
    with pytest.raises(AccessError):
        rig.open(tls=client_context(authority.cert, None, None), tls_name="elsewhere.example")
    assert works(rig.open(tls=client_context(authority.cert, None, None), tls_name="localhost"))


def test_mutual_tls_wants_a_certificate_of_the_client(mutual: Rig, authority: Authority, tmp_path: Path) -> None:
    """Before anything else is read."""
    with pytest.raises((AccessError, UnavailableError)):
        mutual.open(tls=client_context(authority.cert, None, None))
    stranger = Authority(tmp_path, "other").sign("stranger")
    with pytest.raises((AccessError, UnavailableError)):
        mutual.open(tls=client_context(authority.cert, stranger.cert, stranger.key))
    shown = authority.sign("client")
    assert works(mutual.open(tls=client_context(authority.cert, shown.cert, shown.key)))


def test_deadline_and_close_hold_through_tls(rig: Rig, authority: Authority) -> None:
    """The limits of time are Python's there."""
    reach = rig.open(tls=client_context(authority.cert, None, None))
    rig.index.stall()
    with pytest.raises(DeadlineError):
        reach.probe([key(0)], soon(0.1))
    rig.index.go_on()
    assert reach.probe([key(0)], soon()) == b"\1"
    rig.server.close()
    with pytest.raises(KvpoolError):
        reach.probe([key(0)], soon())


def test_new_certificate_counts_at_the_next_handshake(authority: Authority, tmp_path: Path) -> None:
    """No restart when one runs out; a damaged one changes nothing."""
    shown = authority.sign("rotated")
    with served(tls=server_context(shown.cert, shown.key, None, mutual=False)) as rig:
        assert works(rig.open(tls=client_context(authority.cert, None, None)))
        shown.cert.write_text("damaged")
        assert works(rig.open(tls=client_context(authority.cert, None, None)))
        other = Authority(tmp_path, "next")
        fresh = other.sign("fresh")
        shown.key.write_bytes(fresh.key.read_bytes())
        shown.cert.write_bytes(fresh.cert.read_bytes())
        assert works(rig.open(tls=client_context(other.cert, None, None)))


def test_certificates_that_cannot_be_used_are_refused(authority: Authority, pair: Pair, tmp_path: Path) -> None:
    """At once, by name."""
    with pytest.raises(ConfigError, match="missing"):
        client_context(tmp_path / "missing", None, None)
    with pytest.raises(ConfigError):
        server_context(pair.cert, authority.sign("another").key, None, mutual=False)
