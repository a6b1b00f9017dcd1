"""What a node tells about its arena so that others can reach it: plain values, spelled on the wire elsewhere."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ShmOffer:
    """The arena as a file, for processes of the same user on the host that booted as `boot_id`."""

    path: str
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UcxOffer:
    """The arena as remote memory: `length` bytes at virtual address `base_address` of the process behind `worker_address`."""

    worker_address: bytes
    rkey: bytes
    base_address: int
    length: int


def host_boot_id() -> str:
    """This boot of this host; two processes with the same one share a kernel (not always a `/dev/shm`). Empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def same_host(offer: ShmOffer) -> bool:
    """Whether mapping `offer.path` is worth a try from here."""
    return offer.boot_id != "" and offer.boot_id == host_boot_id()
