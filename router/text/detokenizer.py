"""Token ids in, text out, piece by piece.

Bytes of one character may be spread over several tokens, and decoders differ (byte level, byte fallback, word pieces with a space
that vanishes at the start), so no token has a text of its own. What is true of all of them: decoding a window that begins where a
character begins gives the text of that window. So the window is decoded again with each token, and only what is new and settled
is emitted: everything but trailing U+FFFD, the sign of a character not yet complete. Once nothing is pending, the window
shrinks to the tokens since the settled point before, which are the context a decoder needs. A model that emits broken bytes for
ever never settles; past `WINDOW_TOKENS` the window is cut where both halves decode to the same text as the whole.

Emitted text is never taken back. With byte-level decoders (GPT-2, Llama 3, SmolLM, Qwen) the pieces add up to the decoding of
the whole, for any tokens. With byte fallback (Llama 2) they do for valid UTF-8; there, one bad byte makes the decoder void its good
neighbours too, and if these were emitted already they stand.
"""

from collections.abc import Callable, Sequence

WINDOW_TOKENS = 64
"""Most tokens kept undecided."""

_CONTEXT_TOKENS = 8
_PENDING_TOKENS = 4
_BROKEN = "\ufffd"


class Detokenizer:
    """Incremental decoder of one answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: frozenset[int] = frozenset(), context: Sequence[int] = ()) -> None:
        """`decode` turns ids into text; ids in `skip` have no text; `context` are ids before the answer (their text is not emitted)."""
        self._decode = decode
        self._skip = skip
        self._window: list[int] = [token for token in context[-_CONTEXT_TOKENS:] if token not in skip]
        self._emitted = decode(self._window)
        if self._emitted.endswith(_BROKEN):
            self._window, self._emitted = [], ""
        self._settled = len(self._window)

    def push(self, token: int) -> str:
        """The text that `token` settles: often its own, sometimes nothing, sometimes that of several tokens."""
        if token in self._skip:
            return ""
        self._window.append(token)
        text = self._decode(self._window)
        piece = ""
        if text.startswith(self._emitted):
            stable = text.rstrip(_BROKEN)
            if len(stable) > len(self._emitted):
                piece, self._emitted = stable[len(self._emitted) :], stable
            if stable == text == self._emitted:
                self._shrink()
        if len(self._window) > WINDOW_TOKENS:
            piece += self._cut(text)
        return piece

    def finish(self) -> str:
        """What is still held, broken characters included; call once, at the end."""
        text = self._decode(self._window)
        piece = text[len(self._emitted) :] if text.startswith(self._emitted) else self._decode(self._window[self._settled :])
        self._window, self._emitted, self._settled = [], "", 0
        return piece

    def _shrink(self) -> None:
        """All is emitted: keep the tokens since the last settled point as context (at most half a window)."""
        keep = self._window[self._settled :][-WINDOW_TOKENS // 2 :]
        text = self._decode(keep)
        if self._settled and self._emitted.endswith(text) and not text.endswith(_BROKEN):
            self._window, self._emitted = keep, text
        self._settled = len(self._window)

    def _cut(self, text: str) -> str:
        """The window is full of undecided tokens: settle all but the last few."""
        for at in range(len(self._window) - _PENDING_TOKENS, 0, -1):
            head, tail = self._decode(self._window[:at]), self._decode(self._window[at:])
            if head + tail == text and text.startswith(self._emitted):
                piece = head[len(self._emitted) :]
                emitted_of_tail = self._emitted[len(head) :]
                self._window, self._emitted, self._settled = self._window[at:], emitted_of_tail, 0
                return piece
        return self.finish()
