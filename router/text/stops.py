"""Stop strings, wherever token boundaries fall.

What may still become a stop string is held back: the longest suffix that begins one. The answer ends before the earliest occurrence.
"""

from collections.abc import Sequence


class StopScanner:
    """Passes text through until a stop string appears."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are the strings that end the answer (none empty)."""
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped = False
        """True once a stop string was seen; text after it is dropped."""

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to be before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return length
        return 0
