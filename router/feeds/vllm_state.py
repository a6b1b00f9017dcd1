"""What one vLLM engine holds, in our names: its events in, changes of the prefix index out. Pure but for the index.

Theory. The engine's names for blocks are its own, and may be cut to 8 bytes; but an event that stores blocks tells their tokens and the
name of the block before them. So each block gets our key, chained over the tokens from the root of our namespace, and the engine's name is
only kept to find that key again. What can't be mapped is refused and counted, never guessed: a block whose hash holds more than tokens and
a known adapter (images, a salt, prompt embeddings), an adapter without a root, blocks that aren't whole blocks of ours, a block whose
predecessor was never told of. A window or state-space layer's blocks come and go by other rules; only those of full attention count.

Names outlive what they name for a while: a block that went is often stored again, or named as the one before another.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpool.block import BlockKey, chain_keys
from kvpool.errors import ConfigError
from kvpool.policy.prefix import HOLDER_KEYS, PrefixIndex
from kvpool.policy.routing import WorkerRef
from kvpool.request.events import BELOW, BESIDE, DRAM
from router.feeds.vllm_wire import Batch, BlockHash, BlocksRemoved, BlocksStored, Cleared, Event

MAX_PAST: Final = 1 << 16
"""Names remembered of blocks that the engine doesn't hold."""

_TIERS: Final = {"GPU": BESIDE, "CPU": DRAM}  # anything else is farther
_WHOLE: Final = frozenset(("", "full_attention", "mla_attention"))
_MAX_GROUPS: Final = 64


@dataclass(slots=True)
class VllmCounts:
    """What came from one engine, in messages (`batches`, `malformed`, `old`), events (`unknown`), blocks, or times that it happened."""

    batches: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    malformed: int = 0
    """Messages that are no batch of events."""
    unknown: int = 0
    """Events of a kind, or with fields, that are not understood."""
    unmapped: int = 0
    """Blocks that have no name in our namespace."""
    orphans: int = 0
    """Blocks whose predecessor, or whose tokens, were never told."""
    other_groups: int = 0
    """Blocks of layers that aren't full attention."""
    old: int = 0
    """Messages that had come before."""
    gaps: int = 0
    """Times that messages were missing."""
    resets: int = 0
    """Times that all was forgotten: what was missed could not be had, or the engine is another life."""
    replays: int = 0
    replay_failures: int = 0


def unknown_salt(root: bytes, salt: str) -> None:
    """No salt has a root."""


def unknown_adapter(name: str) -> None:
    """No adapter has a root."""


class VllmBlocks:
    """The blocks of the engine `holder`. `root` and `block_tokens`: our namespace's; `adapters`: the root for an adapter by its name.

    `salts`: the root for a `cache_salt` that the engine was given, from the root without; None for one that isn't ours.
    """

    def __init__(
        self,
        index: PrefixIndex[WorkerRef],
        holder: WorkerRef,
        root: bytes,
        block_tokens: int,
        adapters: Callable[[str], bytes | None],
        counts: VllmCounts,
        *,
        salts: Callable[[bytes, str], bytes | None] = unknown_salt,
        max_blocks: int = HOLDER_KEYS,
    ) -> None:
        self._index = index
        self._holder = holder
        self._root = root
        self._size = block_tokens
        self._adapters = adapters
        self._salts = salts
        self._counts = counts
        self._max_blocks = max_blocks
        self._held: dict[BlockHash, tuple[list[BlockKey], int]] = {}  # keys, and bits of the tiers it is on
        self._past: OrderedDict[BlockHash, list[BlockKey]] = OrderedDict()
        self._other_groups: set[int] = set()

    def __len__(self) -> int:
        """Blocks of the engine's that it holds."""
        return len(self._held)

    def apply(self, batch: Batch) -> None:
        """Take in what one message says."""
        self._counts.batches += 1
        for event in batch.events:
            self._apply(event)

    def reset(self) -> None:
        """Nothing is known to be held any more."""
        for name, (keys, _) in self._held.items():
            self._remember(name, keys)
        self._held.clear()
        self._index.cleared(self._holder)

    def _apply(self, event: Event) -> None:
        if isinstance(event, BlocksStored):
            self._stored(event)
        elif isinstance(event, BlocksRemoved):
            self._removed(event)
        elif isinstance(event, Cleared):
            self._counts.cleared += 1
            self.reset()
        else:
            self._counts.unknown += 1

    def _stored(self, event: BlocksStored) -> None:
        count = len(event.hashes)
        if event.kind not in _WHOLE:
            if len(self._other_groups) < _MAX_GROUPS:
                self._other_groups.add(event.group)
            self._counts.other_groups += count
            return
        tier = _TIERS.get(event.medium, BELOW)
        if not event.tokens:
            for name in event.hashes:
                if keys := self._keys(name):
                    self._put([name], [keys], tier, None)
                else:
                    self._counts.orphans += 1
            return
        before = self._keys(event.parent) if event.parent is not None else []
        salt = _salt(event)
        root = self._adapters(event.lora) if event.lora else self._root
        root = self._salts(root, salt) if salt and root is not None else root
        clean = count if root is not None and event.block_size % self._size == 0 else 0
        clean = min(clean, _plain((None, *event.extra[1:]) if salt else event.extra, event.lora, count))
        self._counts.unmapped += count - clean
        if before is None or root is None or not clean:
            self._counts.orphans += clean
            return
        parent = before[-1] if before else None
        try:
            keys = chain_keys(root, event.tokens[: clean * event.block_size], self._size, parent=parent)
        except ConfigError:
            self._counts.unknown += 1
            return
        each = event.block_size // self._size
        self._put(event.hashes[:clean], [keys[i : i + each] for i in range(0, len(keys), each)], tier, parent)

    def _put(self, names: Sequence[BlockHash], keys: Sequence[list[BlockKey]], tier: int, parent: BlockKey | None) -> None:
        """The engine has the consecutive blocks `names` on `tier`."""
        bit = 1 << tier
        for name, own in zip(names, keys, strict=True):
            self._past.pop(name, None)
            self._held[name] = own, self._held.get(name, (own, 0))[1] | bit
        self._counts.stored += len(names)
        self._index.stored(self._holder, [key for own in keys for key in own], tier, parent=parent)
        while len(self._held) > self._max_blocks:
            name = next(iter(self._held))
            self._index.removed(self._holder, self._held.pop(name)[0])

    def _removed(self, event: BlocksRemoved) -> None:
        if event.group in self._other_groups:
            return
        tier = _TIERS.get(event.medium, BELOW)
        for name in event.hashes:
            if keys := self._past.get(name):
                self._index.removed(self._holder, keys, tier)  # known by what a request showed, after all was forgotten
            elif name in self._held:
                keys, bits = self._held[name]
                self._index.removed(self._holder, keys, tier)
                self._counts.removed += 1
                if left := bits & ~(1 << tier):
                    self._held[name] = keys, left
                else:
                    del self._held[name]
                    self._remember(name, keys)

    def _keys(self, name: BlockHash) -> list[BlockKey] | None:
        held = self._held.get(name)
        return held[0] if held else self._past.get(name)

    def _remember(self, name: BlockHash, keys: list[BlockKey]) -> None:
        self._past[name] = keys
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)


def _salt(event: BlocksStored) -> str:
    """What the hash of the first block of a prompt holds besides tokens and its adapter, if that is one text: bare, or after its kind."""
    first = event.extra[0] if event.extra and event.parent is None else None
    rest = [item for item in first if not (event.lora and _names(item, event.lora))] if isinstance(first, list) else []
    only = rest[0] if len(rest) == 1 else None
    if isinstance(only, list) and len(only) == 2 and only[0] == "cache_salt":
        only = only[1]
    return only if isinstance(only, str) else ""


def _plain(extra: Sequence[Any], lora: str, count: int) -> int:
    """How many leading blocks have nothing in their hashes but tokens and the adapter `lora`."""
    for i, one in enumerate(extra):
        if one and not (lora and isinstance(one, list) and all(_names(item, lora) for item in one)):
            return i
    return count


def _names(item: Any, lora: str) -> bool:
    """Whether `item` of a block's extra keys is the adapter: its name, or ("lora", its name, where it was loaded from)."""
    return bool(item == lora or (isinstance(item, list) and len(item) >= 2 and item[:2] == ["lora", lora]))
