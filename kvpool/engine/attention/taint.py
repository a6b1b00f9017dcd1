"""What may be published: which tokens' KV is a function of the prefix alone, and what a choice of tokens depends on. No torch.

Theory. The KV of a token is pure when every pass that made it attended to everything before it. The first token computed
while something was left out has hidden states of its own, and so have all tokens after it: from there on the sequence is
tainted, for good. So one number says it all, `Taint.pure_tokens`. A pool's block may be published under its prefix key only
if all its tokens are among them, so a publisher asks `publishable` how far it may go, and whoever hands KV to a later request cuts
it there too. An attention that happened to leave nothing out taints nothing.

A choice of tokens (a list of kept indices, bounds of pages) is not KV, but may be stored with it. What it depends on decides how:
`STORED_AS`. Only what follows from a block's own prefix may lie beside the block.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from kvpool.block import Flags
from kvpool.errors import ConfigError


class Scope(StrEnum):
    """What a technique's choice depends on."""

    PREFIX = "prefix"
    """The tokens of a block and those before it: a side-car of the block."""
    POSITIONS = "positions"
    """Where tokens are and where the region ends: a derived key of that region."""
    QUERIES = "queries"
    """What this request asks: never shared between requests."""


STORED_AS: Mapping[Scope, Flags] = {
    Scope.PREFIX: Flags.PURE | Flags.HAS_SIDECAR,
    Scope.POSITIONS: Flags.DERIVED,
    Scope.QUERIES: Flags.SESSION,
}
"""How a choice of that scope is marked when it is stored."""

TAINTED_KV = Flags.APPROX | Flags.SESSION
"""How KV is marked that was computed while something was left out: an approximation, good for this session only."""


@dataclass(frozen=True, slots=True)
class Taint:
    """The first `pure_tokens` tokens of a sequence are pure; all of them when it is None."""

    pure_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.pure_tokens is not None and self.pure_tokens < 0:
            raise ConfigError(f"a sequence can't have {self.pure_tokens} pure tokens")

    def since(self, token: int) -> "Taint":
        """Tainted from the token `token` (counted from 0) on, if not before."""
        return replace(self, pure_tokens=token if self.pure_tokens is None else min(token, self.pure_tokens))

    def publishable(self, tokens: int) -> int:
        """How many of the first `tokens` tokens may be published under pure keys."""
        return tokens if self.pure_tokens is None else min(tokens, self.pure_tokens)

    def flags(self, end: int) -> Flags:
        """How a block that ends before token `end` is marked; only PURE ones go under a prefix key."""
        return Flags.PURE if self.publishable(end) == end else TAINTED_KV
