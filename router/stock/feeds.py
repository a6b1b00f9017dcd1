"""The blocks of stock engines in the prefix index: one `VllmFeed` for each life of each of them, as long as the view names it."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from kvpool.cluster import Member
from kvpool.errors import ConfigError
from kvpool.policy.prefix import PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request.events import NO_PRESSURE, Pressure
from router.feeds import View, VllmFeed
from router.stock.roster import KV_EVENTS, KV_REPLAY, KV_TOPIC
from router.stock.spelling import SALT_MARK
from router.worker import Said, adapter_root, scoped_root

log = logging.getLogger("router.stock")


class EngineFeeds:
    """Follows the events of all engines of a view. Lives on one event loop: `start`, then `await close()`."""

    def __init__(self, view: View, index: PrefixIndex[WorkerRef], *, silence_s: float = 5.0) -> None:
        """`silence_s`: see `VllmFeed`."""
        self._view = view
        self._index = index
        self._silence_s = silence_s
        self._feeds: dict[WorkerRef, VllmFeed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._past: Counter[str] = Counter()
        self._unsubscribe: Callable[[], None] | None = None

    def start(self) -> None:
        """Follow the view from now on; call on the event loop, where the view changes too."""
        self._unsubscribe = self._view.subscribe(self._meet)

    async def close(self) -> None:
        """Stop following. What is in the index stays there."""
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None
        feeds, self._feeds = list(self._feeds.values()), {}
        await asyncio.gather(*(feed.close(forget=False) for feed in feeds), *self._ending)

    def complete(self) -> bool:
        """There are no pool nodes that could be asked instead."""
        return True

    def tells(self, holder: WorkerRef) -> bool:
        """Never for sure: what an engine held before its oldest message, nobody tells. So what requests show counts too."""
        return False

    def pressure(self, holder: WorkerRef) -> Pressure:
        """Stock engines don't say."""
        return NO_PRESSURE

    def counts(self) -> dict[str, int]:
        """What came from all engines since the start, by the names of `VllmCounts`."""
        total = Counter(self._past)
        for feed in self._feeds.values():
            total.update(asdict(feed.counts))
        return dict(total)

    def _meet(self, members: Sequence[Member]) -> None:
        wanted = {WorkerRef(m.role, m.id, m.incarnation): m for m in members if m.info.get(KV_EVENTS)}
        for ref in self._feeds.keys() - wanted.keys():
            self._leave(ref)
        for ref, member in wanted.items():
            if ref not in self._feeds:
                self._follow(ref, member)

    def _follow(self, ref: WorkerRef, member: Member) -> None:
        said, info = Said.of(member.info), member.info
        try:
            feed = VllmFeed(
                self._index,
                endpoint=info[KV_EVENTS],
                replay_endpoint=info.get(KV_REPLAY) or None,
                topic=info.get(KV_TOPIC, ""),
                holder=ref,
                root=said.root,
                block_tokens=said.block_tokens,
                adapters=partial(adapter_root, said.root),
                salts=_root_of_salt,
                silence_s=self._silence_s,
            )
        except ConfigError as error:
            log.error("the events of the engine at %s can't be followed: %s", member.address, error)
            return
        self._feeds[ref] = feed
        feed.start()

    def _leave(self, ref: WorkerRef) -> None:
        feed = self._feeds.pop(ref)
        self._past.update(asdict(feed.counts))
        task = asyncio.get_running_loop().create_task(feed.close())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _root_of_salt(root: bytes, salt: str) -> bytes | None:
    """The root of the blocks of requests with the `cache_salt` `salt`, as `router/stock/spelling.py` made it."""
    digits = salt.removeprefix(SALT_MARK)
    if digits == salt:
        return None
    try:
        return scoped_root(root, bytes.fromhex(digits))
    except ValueError:
        return None
