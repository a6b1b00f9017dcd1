"""Whether two processes share a host."""

from kvpool.transport import ShmOffer, host_boot_id, same_host


def test_boot_id_is_stable_and_decides_who_is_here() -> None:
    """The same boot is the same host; another one, or none, is not."""
    assert host_boot_id() == host_boot_id() != ""
    assert same_host(ShmOffer(path="/dev/shm/x", boot_id=host_boot_id()))
    assert not same_host(ShmOffer(path="/dev/shm/x", boot_id="another"))
    assert not same_host(ShmOffer(path="/dev/shm/x", boot_id=""))
