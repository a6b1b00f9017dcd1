"""What a node tells about its arena so that others can reach it, and whether two processes share a host."""

from pathlib import Path

from kvpool.request.pool import ShmOffer, UcxOffer

__all__ = ["ShmOffer", "UcxOffer", "host_boot_id", "same_host"]


def host_boot_id() -> str:
    """This boot of this host; two processes with the same one share a kernel (not always a `/dev/shm`). Empty where unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def same_host(offer: ShmOffer) -> bool:
    """Whether mapping `offer.path` is worth a try from here."""
    return offer.boot_id != "" and offer.boot_id == host_boot_id()
