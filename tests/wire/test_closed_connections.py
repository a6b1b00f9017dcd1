"""A connection that another call has given up is a node that is gone, whatever gRPC calls it."""

import numpy as np
import pytest

from kvpool.errors import UnavailableError
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.pool_client import PoolRpc
from kvpool.wire.pool_data import PoolData

NOBODY = "127.0.0.1:9"


async def test_call_on_a_closed_connection_is_unavailable() -> None:
    """The node failed somebody else a moment ago."""
    rpc = PoolRpc(NOBODY)
    await rpc.close()
    with pytest.raises(UnavailableError, match="closed"):
        await rpc.describe(1)


@pytest.mark.parametrize("way", ["read", "write"])
def test_bytes_over_a_closed_connection_are_unavailable(way: str) -> None:
    """The same for the data plane."""
    data = PoolData(NOBODY, NodeIdentity("a" * 32, 1))
    data.close()
    with pytest.raises(UnavailableError, match="closed"):
        getattr(data, way)(1, [(0, np.zeros(8, np.uint8))], 1)
