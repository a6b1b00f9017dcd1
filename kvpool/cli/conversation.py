"""The demo's conversation: two clients ask about one long document, in turns, and what of each prompt could have been cached."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvpool.cli.chat import ChatClient, Message, Reply
from kvpool.errors import KvpoolError

DOCUMENT = Path(__file__).with_name("demo_document.md")

SCRIPT: tuple[tuple[str, str], ...] = (
    ("alice", "How often does the light flash, and how far is it seen?"),
    ("alice", "Who was the principal keeper from 1902 to 1931?"),
    ("bob", "What should the keeper on watch do when a ship strikes?"),
    ("alice", "And what was unusual about her entries in the journal?"),
    ("bob", "Who takes the breeches buoy to the cliff?"),
    ("alice", "How long does the weight take to fall, and how is it wound up?"),
)
"""(client, question) in the order they are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One question and its answer. `shared_tokens`: prompt tokens that some earlier exchange had already been through."""

    client: str
    question: str
    prompt: tuple[int, ...]
    shared_tokens: int
    reply: Reply

    @property
    def cached_share(self) -> float:
        """Cached part of what was shared; 1 when nothing was."""
        return min(1.0, self.reply.cached_tokens / self.shared_tokens) if self.shared_tokens else 1.0


class Conversation:
    """Runs a script of questions over a document, one history a client, and keeps what was said."""

    def __init__(self, url: str, document: str, *, max_tokens: int) -> None:
        self._document = document
        self._max_tokens = max_tokens
        self._url = url
        self._clients: dict[str, ChatClient] = {}
        self._histories: dict[str, list[Message]] = {}
        self._model = ChatClient(url).model()
        self.exchanges: list[Exchange] = []

    def ask(self, client: str, question: str) -> Exchange:
        """Ask as `client`, whose earlier turns are part of the prompt."""
        http = self._clients.setdefault(client, ChatClient(self._url))
        opening: Message = {"role": "system", "content": f"Answer from this handbook.\n\n{self._document}"}
        history = self._histories.setdefault(client, [opening])
        history.append({"role": "user", "content": question})
        prompt = tuple(http.prompt_tokens(history))
        reply = http.chat(history, model=self._model, max_tokens=self._max_tokens)
        if len(prompt) != reply.prompt_tokens:
            raise KvpoolError(f"the router counted {reply.prompt_tokens} prompt tokens, its tokenizer {len(prompt)}")
        history.append({"role": "assistant", "content": reply.text})
        shared = max((common_prefix(prompt, e.prompt + e.reply.tokens) for e in self.exchanges), default=0)
        exchange = Exchange(client=client, question=question, prompt=prompt, shared_tokens=shared, reply=reply)
        self.exchanges.append(exchange)
        return exchange


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))
