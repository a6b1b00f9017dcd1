"""From what is asked to jobs for the dispatcher, one per choice; and what several choices come to together."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvpool.request import Sampling
from kvpool.security.principal import Principal
from kvpool.units import SECOND
from router.answer import Answer
from router.api.errors import bad_request, context_length_exceeded, unsupported
from router.api.parse import Ask, Prompt
from router.api.shapes import extension_of, usage_of
from router.attention import NAMES, name_in, suits
from router.generation import Generation
from router.job import Job, Trace
from router.services import Services
from router.text.stops import StopScanner
from router.text.tool_calls import ToolCallScanner

TIMEOUT_HEADER = "x-request-timeout"
SESSION_HEADER = "x-session-id"
MAX_SESSION_CHARS = 256
_SEED_STEP = 0x9E3779B97F4A7C15
"""Odd, so that the choices of one request have seeds of their own; of neighbouring seeds too."""


class Composer:
    """Makes the answers of requests. Raises `ApiError` for what can't be asked of this model."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def answers(self, ask: Ask, principal: Principal, *, headers: Mapping[str, str], answer_id: str, arrived_ns: int) -> list[Answer]:
        """One per prompt and choice, in order: all of the first prompt, then all of the second. Nothing has reached a worker yet."""
        scope = self._services.access.scope(principal, ask.cache_salt)
        deadline_ns = arrived_ns + int(self._timeout_s(ask, headers) * SECOND)
        session = ask.session or headers.get(SESSION_HEADER, "")[:MAX_SESSION_CHARS]
        # Who is bound to a tenant may stand back, not push forward.
        priority = ask.priority if principal.tenant is None else max(0, ask.priority)
        self._check_attention(ask)
        found: list[Answer] = []
        for given in ask.prompts or (None,):
            began_ns = self._services.clock.now_ns()
            prompt = await self._tokens(ask, given)
            tokenize_ns = self._services.clock.now_ns() - began_ns
            max_tokens = self._room(ask, prompt)
            leader = len(found)
            for choice in range(ask.n):
                job = Job(
                    request_id=answer_id if not found else f"{answer_id}.{len(found)}",
                    prompt=prompt,
                    max_tokens=max_tokens,
                    stop_tokens=self._stop_tokens(ask),
                    sampling=_apart(ask.sampling, choice),
                    deadline_ns=deadline_ns,
                    scope=scope,
                    user=ask.user,
                    session=session,
                    priority=priority,
                    attention=ask.attention,
                    adapter=ask.adapter,
                )
                trace = Trace(arrived_ns=arrived_ns, tokenize_ns=tokenize_ns)
                found.append(self._answer(ask, job, trace, leader, given))
        return found

    def usage(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """A prompt counts once, whatever the number of its answers."""
        leaders = [answer for index, answer in enumerate(answers) if answer.leader == index]
        return usage_of(
            sum(len(answer.job.prompt) for answer in leaders),
            sum(answer.trace.cached_tokens for answer in leaders),
            sum(len(answer.trace.generated) for answer in answers),
        )

    def extension(self, answers: Sequence[Answer], ask: Ask) -> dict[str, Any]:
        """The `kvpool` object; of several answers one each."""
        each = [extension_of(answer.trace, token_ids=ask.return_token_ids) for answer in answers]
        return each[0] if len(each) == 1 else {"choices": each}

    def _check_attention(self, ask: Ask) -> None:
        """Refuse a technique that requests may not choose here, or that no decode worker knows of."""
        services = self._services
        if ask.attention and name_in(ask.attention) not in services.attention_choices:
            may = ", ".join(name for name in NAMES if name in services.attention_choices)
            why = f"requests may choose {may}, not {name_in(ask.attention)}" if may else "requests may not choose it here"
            raise unsupported("kvpool_attention", why)
        workers = services.dispatcher.fleet.alive("decode")
        if workers and not any(suits(ask.attention, worker) for worker in workers):
            raise unsupported("kvpool_attention", "its decode workers know of no techniques")

    def _answer(self, ask: Ask, job: Job, trace: Trace, leader: int, given: Prompt | None) -> Answer:
        services = self._services
        generation = Generation(
            job=job,
            trace=trace,
            detokenizer=services.model.detokenizer(() if ask.chat else job.prompt),
            stops=StopScanner(ask.stops),
            tools=ToolCallScanner(single=not ask.parallel_tool_calls) if ask.tools else None,
            clock=services.clock,
            on_gap=services.metrics.gap,
        )
        echo = ""
        if ask.echo and given is not None:
            echo = given if isinstance(given, str) else services.model.decode(given)
        return Answer(chat=ask.chat, generation=generation, leader=leader, spell=services.model.spell, echo=echo)

    async def _tokens(self, ask: Ask, given: Prompt | None) -> tuple[int, ...]:
        """Tokenise, and check against the vocabulary."""
        services, vocabulary = self._services, self._services.model.vocabulary
        if given is None:
            prompt = await services.tokens_of(None, ask.messages, ask.tools)
        else:
            prompt = await services.tokens_of(given) if isinstance(given, str) else given
        if not prompt:
            raise bad_request(f"{ask.prompt_param} has no tokens.", param=ask.prompt_param)
        biased = [token for token, _ in ask.sampling.logit_bias]
        for param, tokens in (("prompt", prompt), ("logit_bias", biased), ("stop_token_ids", ask.stop_tokens)):
            if tokens and max(tokens) >= vocabulary:
                raise bad_request(f"{param} holds token id {max(tokens)}; ids end at {vocabulary - 1}.", param=param)
        return prompt

    def _room(self, ask: Ask, prompt: tuple[int, ...]) -> int:
        """How many tokens may be generated; raises when prompt and answer don't fit."""
        context = self._services.context_tokens()
        room = context - len(prompt)
        if room < 1 or (ask.max_tokens is not None and ask.max_tokens > room):
            raise context_length_exceeded(context, len(prompt), ask.max_tokens or 1, param=ask.prompt_param)
        return room if ask.max_tokens is None else ask.max_tokens

    def _stop_tokens(self, ask: Ask) -> tuple[int, ...]:
        model = () if ask.ignore_eos else self._services.model.stop_tokens
        return (*model, *(token for token in ask.stop_tokens if token not in model))

    def _timeout_s(self, ask: Ask, headers: Mapping[str, str]) -> float:
        """The smallest of what the router allows, the body asks for and the header asks for."""
        limits = [self._services.limits.request_timeout_s]
        if ask.timeout_s is not None:
            limits.append(ask.timeout_s)
        if given := headers.get(TIMEOUT_HEADER):
            try:
                asked = float(given)
            except ValueError:
                asked = 0.0
            if not 0.0 < asked < float("inf"):
                raise bad_request(f"{TIMEOUT_HEADER} must be a positive number of seconds, got {given[:40]!r}.", param=TIMEOUT_HEADER)
            limits.append(asked)
        return min(limits)


def _apart(sampling: Sampling, choice: int) -> Sampling:
    """The sampling of a choice: its own seed, the first's is the one that was given."""
    return sampling if choice == 0 else replace(sampling, seed=(sampling.seed + choice * _SEED_STEP) % 2**64)
