"""Attention techniques on their way to the decode workers: who may choose, who is passed over, what H2O asks for; no worker computes."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvpool.errors import ConfigError
from kvpool.request import DecodeRequest, PrefillRequest, Sampling
from kvpool.units import SECOND
from router.assemble import build_dispatcher
from router.attention import parse_choices
from router.job import Job, Trace
from router.settings import Limits
from router.testing.cluster import ScriptedCluster
from router.testing.loop import VirtualLoop, run_virtual
from router.testing.model import NAME, tiny_model
from router.testing.pool import ScriptedPool
from router.testing.server import serving
from router.testing.workers import Fault, ScriptedWorker
from router.text.model import TextModel

PROMPT = tuple(range(10, 30))
QUEST = "quest:budget=0.25,page=16,dense=2"
H2O = "h2o:budget=0.5,heavy=0.5,score=sum"


def answer(prompt: tuple[int, ...], position: int) -> int:
    """A different token at every position."""
    return 40 + position


class World:
    """A dispatcher over scripted workers that say what they decode with ("": they don't)."""

    def __init__(self, loop: VirtualLoop, *decode: str) -> None:
        self.cluster, self.loop = ScriptedCluster("m"), loop
        self.dispatcher = build_dispatcher(
            model="m",
            view=self.cluster,
            connect=self.cluster.connect,
            probe=ScriptedPool(),
            limits=Limits(direct_tokens=0, follow_tokens=1),
            clock=loop,
        )
        self.prefill = self.add("prefill", 1, "full")
        self.decode = [self.add("decode", number, text) for number, text in enumerate(decode, 10)]
        self.dispatcher.fleet.start()
        self.trace = Trace(arrived_ns=0)

    def add(self, role: str, number: int, text: str) -> ScriptedWorker:
        worker = ScriptedWorker(answer)
        self.cluster.add(role, worker, id=f"{number:032x}", info={"attention": text} if text else None)
        return worker

    def job(self, text: str) -> Job:
        """A request made now, that chooses `text`."""
        deadline_ns = self.loop.now_ns() + 60 * SECOND
        return Job(
            request_id="r", prompt=PROMPT, max_tokens=9, stop_tokens=(), sampling=Sampling(), deadline_ns=deadline_ns, attention=text
        )

    async def tokens(self, text: str) -> list[int]:
        """The answer, into a fresh trace."""
        self.trace = Trace(arrived_ns=self.loop.now_ns())
        return [token async for token in self.dispatcher.generate(self.job(text), self.trace)]

    def decoded(self) -> list[DecodeRequest]:
        """What the decode workers were asked, in the order of the workers."""
        return [call for worker in self.decode for call in worker.calls if isinstance(call, DecodeRequest)]


def test_a_chosen_technique_reaches_the_decode_worker_behind_a_usual_prefill() -> None:
    """The prompt is read whole, so the prefill is anybody's; the worker's own technique is for those that choose none."""

    async def run(loop: VirtualLoop) -> None:
        world = World(loop, "full")
        for text, sent in ((QUEST, QUEST), ("", "full"), ("full", "full")):
            assert len(await world.tokens(text)) == 9
            assert isinstance(world.prefill.calls.pop(), PrefillRequest)
            assert world.decoded()[-1].attention == world.trace.attention == sent
            assert world.decoded()[-1].generated == (40,)

    run_virtual(run)


@pytest.mark.parametrize(("text", "own"), [(H2O, "full"), ("", H2O)])
def test_a_technique_that_sees_the_whole_prompt_goes_to_a_decode_worker_at_once(text: str, own: str) -> None:
    """What a prefill would compute could not be used; nobody follows such a request, and it follows nobody."""

    async def run(loop: VirtualLoop) -> None:
        world = World(loop, own)
        assert len(await world.tokens(text)) == 9
        (request,) = world.decoded()
        assert (world.prefill.calls, request.generated, request.attention) == ([], (), H2O)
        assert world.trace.direct
        assert world.dispatcher.entrance.shared.counts.led == 0

    run_virtual(run)


def test_an_answer_goes_on_with_the_technique_it_began_with() -> None:
    """It began with the first worker's own. The second one's own is another; a third one, which knows of none, is passed over."""

    async def run(loop: VirtualLoop) -> None:
        world = World(loop, QUEST)
        world.decode[0].faults.extend([Fault(kind="die", after=4), Fault(kind="die")])
        async with aclosing(world.dispatcher.generate(world.job(""), world.trace)) as tokens:
            assert [await anext(tokens) for _ in range(2)] == [40, 41]
            world.decode += [world.add("decode", 1, ""), world.add("decode", 11, "full")]
            assert [token async for token in tokens] == [42 + i for i in range(7)]
        assert {request.attention for request in world.decoded()} == {QUEST} == {world.trace.attention}
        assert [len(worker.calls) for worker in world.decode[1:]] == [0, 1]

    run_virtual(run)


def test_workers_that_know_of_no_techniques_are_passed_over() -> None:
    """They would read everything without a word."""

    async def run(loop: VirtualLoop) -> None:
        world = World(loop, "", "", "full")
        for _ in range(5):
            assert len(await world.tokens(QUEST)) == 9
        assert [len(worker.calls) for worker in world.decode] == [0, 0, 5]

    run_virtual(run)


def test_what_is_tainted_is_not_learnt_to_be_there() -> None:
    """A next turn must not be sent after blocks that the worker never named."""

    async def run(loop: VirtualLoop) -> None:
        world, known = World(loop, "full"), []
        for text in (QUEST, "full"):
            await world.tokens(text)
            (worker,) = world.dispatcher.fleet.alive("decode")
            known.append(world.dispatcher.holdings.index.held(worker.ref))
        assert known == [5, 7]

    run_virtual(run)


def test_parse_choices_reads_names() -> None:
    """A misspelt one is refused at the start, not missed by clients."""
    assert parse_choices("") == frozenset()
    assert parse_choices("full, quest") == {"full", "quest"}
    with pytest.raises(ConfigError, match="has quset; there are full"):
        parse_choices("quset,full")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return tiny_model(Path(tmp_path_factory.mktemp("model")))


@contextlib.asynccontextmanager
async def endpoint(model: TextModel, choices: str, own: str = "full") -> AsyncIterator[tuple[Any, ScriptedWorker, ScriptedWorker]]:
    """`(ask, prefill worker, decode worker)`: `await ask(**fields)` is the response."""
    cluster = ScriptedCluster(NAME)
    prefill, decode = ScriptedWorker(answer), ScriptedWorker(answer)
    cluster.add("prefill", prefill)
    cluster.add("decode", decode, info={"attention": own} if own else None)
    async with serving(model, cluster, attention_choices=parse_choices(choices)) as running, httpx.AsyncClient() as client:

        async def ask(**fields: Any) -> httpx.Response:
            body = {"model": NAME, "prompt": list(PROMPT), "max_tokens": 3, "ignore_eos": True, **fields}
            return await client.post(f"{running.url}/v1/completions", json=body, timeout=20)

        yield ask, prefill, decode


async def test_requests_choose_what_the_server_lets_them(model: TextModel) -> None:
    """The answer says in full what it was read with."""
    async with endpoint(model, "quest,full") as (ask, _, decode):
        chosen = await ask(kvpool_attention="quest:page=8")
        plain = await ask()
        assert chosen.json()["kvpool"]["attention"] == "quest:budget=0.25,page=8,dense=2"
        assert plain.json()["kvpool"]["attention"] == "full"
        assert [call.attention for call in decode.calls if isinstance(call, DecodeRequest)] == ["quest:budget=0.25,page=8,dense=2", "full"]


@pytest.mark.parametrize(
    ("choices", "own", "text", "code", "says"),
    [
        ("", "full", "quest", "unsupported_parameter", "may not choose it here"),
        ("quest,full", "full", "h2o", "unsupported_parameter", "may choose full, quest, not h2o"),
        ("quest", "", "quest", "unsupported_parameter", "know of no techniques"),
        ("quest", "full", "quest:page=x", "invalid_value", "not a number"),
        ("quest", "full", "nonsense", "invalid_value", "there are full, streaming, h2o, snapkv, quest"),
        ("quest", "full", "q" * 300, "invalid_value", "at most 256"),
    ],
)
async def test_a_technique_that_is_not_to_be_had_is_refused_before_anything_is_computed(
    model: TextModel, choices: str, own: str, text: str, code: str, says: str
) -> None:
    """400 with the reason; no worker hears of it."""
    async with endpoint(model, choices, own) as (ask, prefill, decode):
        response = await ask(kvpool_attention=text)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, code, "kvpool_attention")
        assert says in error["message"]
        assert prefill.calls == decode.calls == []
