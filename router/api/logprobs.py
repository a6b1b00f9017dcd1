"""Log-probabilities as OpenAI spells them: one way for chat, an older one for plain completions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvpool.request import Logprobs

Spell = Callable[[int], tuple[str, bytes]]
"""Text and bytes of a token."""

LEAST = -9999.0
"""What stands for a probability of 0, whose logarithm JSON has no number for."""


class Likely(NamedTuple):
    """One token of an answer; `offset`: characters of the answer that were settled before it."""

    token: int
    offset: int
    logprobs: Logprobs


def chat_logprobs(tokens: Sequence[Likely], spell: Spell) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer or chunk."""
    content = []
    for token, _, told in tokens:
        top = [_entry(other, logprob, spell) for other, logprob in told.top]
        content.append({**_entry(token, told.chosen, spell), "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[Likely], spell: Spell, before: int) -> dict[str, Any]:
    """`choices[].logprobs` of a plain completion or chunk; `before` characters of echo stand before the answer."""
    tops = [{spell(other)[0]: max(logprob, LEAST) for other, logprob in (*told.top, (token, told.chosen))} for token, _, told in tokens]
    return {
        "tokens": [spell(token)[0] for token, _, _ in tokens],
        "token_logprobs": [max(told.chosen, LEAST) for _, _, told in tokens],
        "top_logprobs": tops if any(told.top for _, _, told in tokens) else None,
        "text_offset": [before + offset for _, offset, _ in tokens],
    }


def _entry(token: int, logprob: float, spell: Spell) -> dict[str, Any]:
    text, raw = spell(token)
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(raw)}
