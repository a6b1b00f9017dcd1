"""From "which node holds which block" to "how much of the text is cached, and where". Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kvpool.errors import ProtocolError

Span = tuple[int, int]
"""Tokens start (inclusive) to end (exclusive)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """`cached_tokens`: the longest prefix of which every block is on some node. `spans`: per node, the token ranges it holds."""

    tokens: int
    block_tokens: int
    cached_tokens: int
    cached_blocks: int
    spans: dict[str, tuple[Span, ...]]
    blocks: dict[str, int]


def report_prefix(presence: Mapping[str, bytes], *, tokens: int, block_tokens: int) -> PrefixReport:
    """`presence` holds one byte per block (0 or 1) for each node, the trailing partial block included. Raises `ProtocolError`."""
    count = -(-tokens // block_tokens)
    for node, present in presence.items():
        if len(present) != count:
            raise ProtocolError(f"node {node} answered {len(present)} blocks for {count}")
    held = [any(present[block] for present in presence.values()) for block in range(count)]
    cached_blocks = held.index(False) if False in held else count
    return PrefixReport(
        tokens=tokens,
        block_tokens=block_tokens,
        cached_tokens=min(tokens, cached_blocks * block_tokens),
        cached_blocks=cached_blocks,
        spans={node: _spans(present, tokens, block_tokens) for node, present in presence.items()},
        blocks={node: sum(map(bool, present)) for node, present in presence.items()},
    )


def _spans(present: bytes, tokens: int, block_tokens: int) -> tuple[Span, ...]:
    spans: list[Span] = []
    for block, held in enumerate(present):
        if not held:
            continue
        start, end = block * block_tokens, min(tokens, (block + 1) * block_tokens)
        if spans and spans[-1][1] == start:
            start = spans.pop()[0]
        spans.append((start, end))
    return tuple(spans)
