"""The router's end of a worker: plain values in and out, kvpool errors only."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from kvpool.request import DecodeEvent, DecodeRequest, PrefillEvent, PrefillRequest, WorkerStatus
from kvpool.wire import convert_work as convert
from kvpool.wire.channel import open_channel
from kvpool.wire.credentials import PLAIN, Security
from kvpool.wire.gen import worker_pb2 as pb
from kvpool.wire.gen import worker_pb2_grpc as rpc
from kvpool.wire.status import told


class WorkerClient:
    """A connection to one worker at `address` (host:port).

    Every call takes its time limit in seconds. Errors: `ConfigError` (the worker refuses the request), `UnavailableError`,
    `DeadlineError`, `ProtocolError`. Closing an iterator, or cancelling the task that consumes it, cancels the call.
    """

    def __init__(self, address: str, security: Security = PLAIN) -> None:
        self.address = address
        self._security = security
        self._channel = open_channel(address, security)
        self._stub: Any = rpc.WorkerStub(self._channel)

    async def prefill(self, request: PrefillRequest, timeout_s: float) -> AsyncIterator[PrefillEvent]:
        """`FirstToken`, then `Published`."""
        async with aclosing(self._events(self._stub.Prefill, convert.prefill_to_pb(request), timeout_s)) as messages:
            async for message in messages:
                yield convert.prefill_event_from_pb(message)

    async def decode(self, request: DecodeRequest, timeout_s: float) -> AsyncIterator[DecodeEvent]:
        """`Started`, `TokenOut`..., `Finished`."""
        async with aclosing(self._events(self._stub.Decode, convert.decode_to_pb(request), timeout_s)) as messages:
            async for message in messages:
                yield convert.decode_event_from_pb(message)

    async def status(self, timeout_s: float) -> WorkerStatus:
        """The worker's status."""
        with told(self.address):
            message = await self._stub.Status(pb.WorkerStatusRequest(), timeout=timeout_s, metadata=self._metadata)
        return convert.status_from_pb(message)

    async def close(self) -> None:
        """Cancel what is in flight and disconnect."""
        await self._channel.close(grace=None)

    @property
    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._security.metadata(self.address)

    async def _events(self, method: Any, request: Any, timeout_s: float) -> AsyncGenerator[Any, None]:
        with told(self.address):
            call = method(request, timeout=timeout_s, metadata=self._metadata)
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()  # a no-op when the call is over
