"""Follows the KV events of one stock vLLM engine: its publisher's socket, and what it replays of what was missed.

Theory. The engine publishes numbered messages (PUB) and keeps the latest to replay (ROUTER); it knows nothing of who listens, and drops
what a slow listener doesn't take. So everything is the listener's to notice. A number that is missing, an old one with another content, or
a silence in which the engine may have been replaced leads to one question: replay from the last message that was taken in. If the answer
begins with that very message nothing is lost. Otherwise all that is known of the engine is forgotten, and rebuilt from what it still
remembers. After a silence with no answer at all, all is forgotten too once the engine speaks again.

Without a replay endpoint a gap means that all is forgotten, and a silence is taken for nothing but silence. What can't be read is dropped
and counted. Messages wait in the socket (`WAITING` of them), then at the engine; what goes beyond is a gap.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final

import zmq
import zmq.asyncio

from kvpool.block import KEY_BYTES, MAX_BLOCK_TOKENS
from kvpool.errors import ConfigError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from router.feeds.vllm_order import Order, Place
from router.feeds.vllm_state import VllmBlocks, VllmCounts, unknown_adapter, unknown_salt
from router.feeds.vllm_wire import MalformedError, read_batch

log = logging.getLogger("router.feeds")

WAITING: Final = 1024
REPLAYED: Final = 1 << 14
"""Messages of a replay that wait; engines keep 10,000 unless told otherwise."""
MAX_MESSAGE_BYTES: Final = 16 << 20
_SEQUENCE_BYTES: Final = 8
_END: Final = (1 << 64) - 1
_LONGEST_PAUSE_S: Final = 5.0
_MAX_PARTS: Final = 64
_BETWEEN_S: Final = 1.0
"""A replay that has begun doesn't pause for so long."""


class VllmFeed:
    """Keeps what one engine holds in `index`, under `holder`. Lives on one event loop: `start`, then `await close()`.

    `endpoint`: where the engine publishes (tcp://host:port, ipc://path), `replay_endpoint`: where it replays; `topic`: what its messages
    begin with. `root` and `block_tokens`: of our keys for its model; its blocks must be whole blocks of ours. `adapters`: the
    root for a LoRA adapter by its name, `salts`: that for a root and a request's `cache_salt`, None for one that isn't ours. Of a
    data-parallel engine each rank is a feed of its own (port + rank).

    `replay_s`: how long the engine may take for each message of a replay; replays are at least `replay_pause_s` apart. After `silence_s`
    without a message it is asked whether it is still the same. Raises `ConfigError`.
    """

    def __init__(
        self,
        index: PrefixIndex[WorkerRef],
        *,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        holder: WorkerRef,
        root: bytes,
        block_tokens: int,
        adapters: Callable[[str], bytes | None] = unknown_adapter,
        salts: Callable[[bytes, str], bytes | None] = unknown_salt,
        replay_s: float = 5.0,
        silence_s: float = 5.0,
        replay_pause_s: float = 0.2,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        for one in (endpoint, *((replay_endpoint,) if replay_endpoint is not None else ())):
            if not one.startswith(("tcp://", "ipc://", "inproc://")) or "*" in one:
                raise ConfigError(f"an engine's endpoint is tcp://host:port or ipc://path to connect to, got {one!r}")
        if len(root) != KEY_BYTES:
            raise ConfigError(f"the root of a namespace has {KEY_BYTES} bytes")
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS or min(replay_s, silence_s) <= 0:
            raise ConfigError(f"block_tokens must be 1..{MAX_BLOCK_TOKENS}, and times positive")
        self.holder = holder
        self.counts = VllmCounts()
        self.complete = False
        """Whether the engine has replayed what it remembers; true from the start on without a replay endpoint."""
        self._blocks = VllmBlocks(index, holder, root, block_tokens, adapters, self.counts, salts=salts)
        self._index = index
        self._order = Order()
        self._endpoint, self._replay_endpoint, self._topic = endpoint, replay_endpoint, topic.encode()
        self._replay_s, self._silence_s, self._replay_pause_s = replay_s, silence_s, replay_pause_s
        self._context = context or zmq.asyncio.Context.instance()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Blocks of the engine's that it is known to hold."""
        return len(self._blocks)

    def start(self) -> None:
        """Follow the engine from now on; call on the event loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self, *, forget: bool = True) -> None:
        """Stop following; with `forget` the engine leaves the index."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if forget:
            self._index.forget(self.holder)

    async def _run(self) -> None:
        pause_s = 0.1
        while True:
            socket = self._context.socket(zmq.SUB)
            try:
                _bounded(socket, WAITING)
                socket.setsockopt(zmq.SUBSCRIBE, self._topic)
                socket.connect(self._endpoint)
                await self._follow(socket)
            except zmq.ZMQError as error:
                log.warning("the events of %s can't be followed now: %s", self._endpoint, error)
            finally:
                socket.close(linger=0)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _follow(self, socket: Any) -> None:
        """Take messages until the socket fails."""
        loop = asyncio.get_running_loop()
        sure, heard = await self._catch_up(), loop.time()
        while True:
            if not await socket.poll(self._silence_s * 1e3):
                sure = await self._catch_up()
                continue
            if (not sure or loop.time() - heard >= self._silence_s) and not await self._catch_up():
                self._forget()
            sure, heard = True, loop.time()
            await self._hear(await socket.recv_multipart())

    async def _hear(self, frames: list[bytes]) -> None:
        """One message from the publisher: topic, number, payload."""
        if len(frames) != 3 or len(frames[1]) != _SEQUENCE_BYTES:
            self.counts.malformed += 1
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        place = self._order.place(sequence, payload)
        if place in (Place.GAP, Place.OTHER_LIFE):
            self.counts.gaps += 1
            await asyncio.sleep(self._replay_pause_s)
            if self._replay_endpoint is None or not await self._catch_up():
                self._forget()
            place = self._order.place(sequence, payload)
        if place is Place.OLD:
            self.counts.old += 1
            return
        if place is not Place.NEXT and self._order.next:
            self._forget()  # the engine could not say what is between
        self._take(sequence, payload)

    async def _catch_up(self) -> bool:
        """Take in what the engine has said since; False when it doesn't answer."""
        if self._replay_endpoint is not None:
            try:
                for _ in range(_MAX_PARTS):
                    if await self._replay(max(0, self._order.next - 1)):
                        break
                else:
                    raise TimeoutError("no end of it")
            except (zmq.ZMQError, TimeoutError) as error:
                self.counts.replay_failures += 1
                log.warning("%s does not replay its events: %s", self._replay_endpoint, error or "no answer in time")
                return False
        self.complete = True
        return True

    async def _replay(self, first: int) -> bool:
        """Take in what the engine replays from message `first` on, and prove by that one that it is the engine we know.

        False when it is to be asked again: it is not and all was forgotten, or a part of the answer was lost on the way, for an engine
        drops what it can't send at once. `TimeoutError` when nothing new came.
        """
        self.counts.replays += 1
        due = self._order.next
        proved = due == 0
        try:
            async with aclosing(self._replayed(first)) as messages:
                async for sequence, payload in messages:
                    place = self._order.place(sequence, payload)
                    if place is Place.OTHER_LIFE or (not proved and (sequence != first or place is not Place.OLD)):
                        self._forget()
                        return False
                    proved = True
                    if place is Place.GAP and self._order.next:
                        if self._order.next > due:
                            return False
                        self._forget()  # what is missing is not there any more
                        due = 0
                    if place is not Place.OLD:
                        self._take(sequence, payload)
        except TimeoutError:
            if self._order.next > due:
                return False
            raise
        if not proved:
            self._forget()
        return proved

    async def _replayed(self, first: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The messages that the engine still has, from number `first` on."""
        socket, patience_s = self._context.socket(zmq.DEALER), self._replay_s
        try:
            _bounded(socket, REPLAYED)
            socket.connect(self._replay_endpoint or "")
            async with asyncio.timeout(patience_s):
                await socket.send_multipart([b"", first.to_bytes(_SEQUENCE_BYTES, "big")])
            while True:
                async with asyncio.timeout(patience_s):
                    frames = await socket.recv_multipart()
                # an empty frame, in some versions the topic, the number, the payload
                if len(frames) < 3 or len(frames[-2]) != _SEQUENCE_BYTES:
                    self.counts.malformed += 1
                    continue
                sequence = int.from_bytes(frames[-2], "big")
                if sequence == _END:
                    return
                yield sequence, frames[-1]
                patience_s = min(patience_s, _BETWEEN_S)
        finally:
            socket.close(linger=0)

    def _take(self, sequence: int, payload: bytes) -> None:
        self._order.took(sequence, payload)
        try:
            self._blocks.apply(read_batch(payload))
        except MalformedError:
            self.counts.malformed += 1

    def _forget(self) -> None:
        """What is known of the engine may be wrong."""
        if self._order.next:
            self.counts.resets += 1
        self._order.begin()
        self._blocks.reset()


def _bounded(socket: Any, waiting: int) -> None:
    """Limits on what waits, on a message, and on how often a connection is tried."""
    socket.setsockopt(zmq.RCVHWM, waiting)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
