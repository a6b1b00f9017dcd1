"""A request as vLLM takes it, and its chunks, as vLLM 0.32 was seen to send them."""

import json

import pytest

from kvpool.errors import ProtocolError
from kvpool.request import DecodeRequest, FinishReason, Logprobs, Sampling, Scope
from router.stock.spelling import Choice, chunk_of, completion_of, reason_of, tokens_of

SEEN = (
    b'{"id":"cmpl-84","object":"text_completion","created":1796067342,"model":"smollm2","choices":[{"index":0,"text":"re a m",'
    b'"logprobs":{"text_offset":[11,23],"token_logprobs":[-4.4,-4.5],"tokens":["token_id:257","token_id:253"],"top_logprobs":'
    b'[{"token_id:216":-4.6,"token_id:257":-4.4},{"token_id:253":-4.5,"token_id:283":-4.7}]},"finish_reason":"length","stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[257,253]}]}'
)


def body_of(**changes: object) -> dict[str, object]:
    request = DecodeRequest(**{"request_id": "r", "prompt": (1, 2, 3), "max_tokens": 8, **changes})  # type: ignore[arg-type]
    found: dict[str, object] = json.loads(completion_of(request, "m"))
    return found


def test_request_overrides_what_an_engine_would_do_by_itself() -> None:
    """Its end token, its generation config, its text."""
    body = body_of(stop_tokens=(5, 6), sampling=Sampling(temperature=0.5, top_p=0.9, top_k=4, seed=7))
    wanted = {"prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": True, "stop_token_ids": [5, 6], "return_token_ids": True, "stream": True}
    wanted |= {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": 7, "repetition_penalty": 1.0, "min_p": 0.0, "model": "m"}
    assert {name: body[name] for name in wanted} == wanted
    assert not {"logprobs", "logit_bias", "cache_salt"} & body.keys()


def test_retry_goes_on_behind_what_was_said() -> None:
    """With draws of its own: the same ones again would repeat themselves."""
    first, again = body_of(sampling=Sampling(seed=3)), body_of(sampling=Sampling(seed=3), generated=(9, 8))
    assert (again["prompt"], again["max_tokens"]) == ([1, 2, 3, 9, 8], 6)
    assert first["seed"] == 3 != again["seed"]


def test_large_seed_is_a_signed_number() -> None:
    """The engine's are."""
    assert body_of(sampling=Sampling(seed=2**64 - 5))["seed"] == -5


def test_scope_has_a_salt_of_its_own() -> None:
    """Or tenants would share KV, and see it in the time that answers take."""
    assert body_of(scope=Scope(salt=b"\1\2", tenant="t"))["cache_salt"] == "kvpool-0102"


def test_chunk_is_tokens_and_their_log_probabilities() -> None:
    """Best first, as many as were asked for."""
    (choice,) = chunk_of(SEEN).choices
    assert tokens_of(choice, None) == [(257, None), (253, None)]
    assert tokens_of(choice, 1) == [
        (257, Logprobs(chosen=-4.4, top=((257, -4.4),))),
        (253, Logprobs(chosen=-4.5, top=((253, -4.5),))),
    ]
    assert reason_of(choice) is FinishReason.LENGTH


def test_usage_says_what_was_cached() -> None:
    """In the last chunk, which has no choice."""
    chunk = chunk_of(b'{"choices":[],"usage":{"prompt_tokens":300,"prompt_tokens_details":{"cached_tokens":256}}}')
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens_details is not None
    assert chunk.usage.prompt_tokens_details.cached_tokens == 256


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b'{"choices":[{"token_ids":["a"]}]}', b"[" * 100_000])
def test_chunk_that_can_not_be_read_is_an_error(data: bytes) -> None:
    """Whatever is at that address."""
    with pytest.raises(ProtocolError):
        chunk_of(data)


def test_engine_that_tells_no_token_ids_is_too_old() -> None:
    """The message says what is needed."""
    with pytest.raises(ProtocolError, match=r"vLLM 0\.10\.2 or later"):
        tokens_of(Choice(), None)


def test_log_probabilities_that_are_missing_or_named_by_text_are_an_error() -> None:
    """Never guessed."""
    with pytest.raises(ProtocolError, match="fewer"):
        tokens_of(Choice(token_ids=[1]), 1)
    by_text = chunk_of(b'{"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[-1],"top_logprobs":[{" a":-1}]}}]}').choices[0]
    with pytest.raises(ProtocolError, match="by their text"):
        tokens_of(by_text, 1)


def test_answer_that_was_aborted_is_not_finished() -> None:
    """It goes on elsewhere."""
    with pytest.raises(ProtocolError, match="abort"):
        reason_of(Choice(finish_reason="abort"))
