"""The data plane of last resort: bytes of leased ranges as a gRPC stream. Blocking, thread-safe, for worker threads."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from kvpool.errors import ProtocolError, UnavailableError
from kvpool.wire.channel import CHUNK_BYTES, open_blocking_channel
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.fence import NodeIdentity
from kvpool.wire.gen import pool_pb2 as pb
from kvpool.wire.gen import pool_pb2_grpc as rpc
from kvpool.wire.status import error_of

Bytes = npt.NDArray[np.uint8]


class PoolData:
    """A data connection to `node` at `address`; errors as for `PoolRpc`."""

    def __init__(self, address: str, node: NodeIdentity, security: Security = PLAIN) -> None:
        self.address = address
        self._node = node.metadata()
        self._security = security
        self._channel = open_blocking_channel(address, security)
        self._stub: Any = rpc.PoolStub(self._channel)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return (*self._node, *self._security.metadata(self.address))

    def read(self, lease_id: int, parts: Sequence[tuple[int, Bytes]], timeout_s: float) -> None:
        """Fill each array of `parts` with the arena's bytes from its offset on."""
        ranges = [pb.Range(offset=offset, length=target.nbytes) for offset, target in parts]
        targets = iter([target for _, target in parts])
        target, filled = np.empty(0, np.uint8), 0
        try:
            request = pb.ReadRequest(lease_id=lease_id, ranges=ranges)
            for message in self._begin(lambda: self._stub.Read(request, timeout=timeout_s, metadata=self._metadata)):
                data = np.frombuffer(message.data, np.uint8)
                while data.nbytes:
                    if filled == target.nbytes:
                        target, filled = next(targets), 0
                    take = min(data.nbytes, target.nbytes - filled)
                    target[filled : filled + take] = data[:take]
                    data, filled = data[take:], filled + take
        except StopIteration:
            raise ProtocolError(f"{self.address}: sent more bytes than asked for") from None
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        if filled != target.nbytes or next(targets, None) is not None:
            raise ProtocolError(f"{self.address}: sent fewer bytes than asked for")

    def write(self, lease_id: int, parts: Sequence[tuple[int, Bytes]], timeout_s: float) -> None:
        """Put each array of `parts` into the arena from its offset on."""

        def chunks() -> Iterator[Any]:
            for offset, source in parts:
                for at in range(0, source.nbytes, CHUNK_BYTES):
                    data = source[at : at + CHUNK_BYTES].tobytes()
                    yield pb.WriteChunk(lease_id=lease_id, offset=offset + at, data=data)

        try:
            answer = self._begin(lambda: self._stub.Write(chunks(), timeout=timeout_s, metadata=self._metadata))
        except grpc.RpcError as error:
            raise error_of(error, self.address) from error
        if answer.written != sum(source.nbytes for _, source in parts):
            raise ProtocolError(f"{self.address}: wrote {answer.written} bytes of what was sent")

    def _begin(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except ValueError as error:  # how gRPC says that the channel is closed
            raise UnavailableError(f"{self.address}: the connection was closed before the call") from error

    def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        self._channel.close()
