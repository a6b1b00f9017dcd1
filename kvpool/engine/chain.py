"""The tokens of one sequence and the keys of its blocks, growing together."""

from collections.abc import Sequence

from kvpool.block import BlockKey, chain_keys


class Chain:
    """`tokens` so far and `keys` of its full blocks of `block_tokens`; `root` is the namespace's root (32 bytes)."""

    def __init__(self, root: bytes, block_tokens: int, tokens: Sequence[int]) -> None:
        self.root = root
        self.block_tokens = block_tokens
        self.tokens = list(tokens)
        self.keys: list[BlockKey] = chain_keys(root, self.tokens, block_tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        """One more token; its block gets a key when it is full."""
        self.tokens.append(token)
        if len(self.tokens) % self.block_tokens == 0:
            self.keys += self._after(len(self.keys), tail=False)

    def with_tail(self) -> list[BlockKey]:
        """The keys of all blocks, the trailing partial one (if there is one) included."""
        return self.keys + self._after(len(self.keys), tail=True)

    def counts(self, first: int, keys: int) -> list[int]:
        """Valid tokens of each of the blocks `first .. keys-1`: full ones, but for a partial last."""
        size = self.block_tokens
        return [min(size, len(self.tokens) - i * size) for i in range(first, keys)]

    def _after(self, block: int, *, tail: bool) -> list[BlockKey]:
        rest = self.tokens[block * self.block_tokens :]
        return chain_keys(self.root, rest, self.block_tokens, parent=self.keys[block - 1] if block else None, tail=tail)
