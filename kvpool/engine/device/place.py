"""Where the KV of an engine is kept: by layout, and by the device of its model."""

from kvpool.block import Geometry
from kvpool.engine.device.store import DeviceKvStore
from kvpool.engine.device.streams import Device
from kvpool.engine.paged.store import KvStore
from kvpool.engine.paged.windows import VirtualKvStore
from kvpool.engine.settings import Layout, check_device

LAYOUTS: dict[Layout, type[KvStore]] = {"paged": KvStore, "vattention": VirtualKvStore}


def make_store(geometry: Geometry, blocks: int, device: Device | None = None, layout: Layout = "paged") -> KvStore:
    """An empty store of `blocks` blocks; `device` None is the CPU. Raises `ConfigError` for a layout that the device doesn't have."""
    if device is None:
        return LAYOUTS[layout](geometry, blocks)
    check_device(str(device.place), layout=layout)
    return DeviceKvStore(geometry, blocks, device)
