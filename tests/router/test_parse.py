"""What a body asks for, or which of its fields is wrong."""

import json
from typing import Any

import pytest

from kvpool.request import Sampling
from router.api.errors import ApiError
from router.api.parse import Ask, TokenizeAsk, parse_chat, parse_completion, parse_tokenize

USER = [{"role": "user", "content": "hi"}]


def _chat(**fields: Any) -> Ask:
    return parse_chat(json.dumps({"model": "m", "messages": USER, **fields}).encode(), model="m", seed=7)


def _completion(**fields: Any) -> Ask:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode(), model="m", seed=7)


def _refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _chat(**fields)
    return caught.value


def test_defaults_are_openais() -> None:
    """Callers rely on them without knowing."""
    chat, completion = _chat(), _completion()
    assert chat.sampling == Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=7)
    assert (chat.max_tokens, chat.stops) == (None, ())
    assert not any((chat.stream, chat.include_usage, chat.ignore_eos, chat.return_token_ids))
    assert completion.max_tokens == 16


def test_every_supported_field_is_taken() -> None:
    """And none is mixed up with another."""
    ask = _chat(
        max_completion_tokens=9,
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=40,
        seed=-1,
        stop=["a", "b"],
        stream=True,
        stream_options={"include_usage": True},
        ignore_eos=True,
    )
    assert ask.sampling == Sampling(temperature=0.0, top_p=0.5, top_k=40, seed=2**64 - 1)
    assert (ask.max_tokens, ask.stops, ask.stream, ask.include_usage, ask.ignore_eos) == (9, ("a", "b"), True, True, True)
    assert _chat(stop="x").stops == ("x",)
    assert _chat(max_tokens=5).max_tokens == 5


def test_messages_become_plain() -> None:
    """Templates take strings; parts are joined, and developer is the newer word for system."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = _chat(messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": parts, "name": "x"}])
    assert ask.messages == ({"role": "system", "content": "d"}, {"role": "user", "content": "a\nb"})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", ("hi",)),
        (["hi"], ("hi",)),
        ([1, 2, 3], ((1, 2, 3),)),
        ([[1, 2, 3]], ((1, 2, 3),)),
        (["a", "b"], ("a", "b")),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompt_is_text_or_tokens_or_several(prompt: Any, prompts: tuple[Any, ...]) -> None:
    """OpenAI allows four spellings; a list of one is one."""
    assert _completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []]])
def test_empty_prompt_is_refused(prompt: Any) -> None:
    """There is nothing to continue."""
    with pytest.raises(ApiError) as caught:
        _completion(prompt=prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_answers_to_one_request_are_bounded() -> None:
    """By `n` alone, and by prompts times `n`."""
    assert _completion(prompt=["a"] * 8, n=8).n == 8
    for fields, param in (({"n": 65}, "n"), ({"prompt": ["a"] * 9, "n": 8}, "prompt")):
        with pytest.raises(ApiError) as caught:
            _completion(**fields)
        assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("prompt", [[-1], [True], [1.5], ["a", 1], {"a": 1}, 5, [None]])
def test_prompt_of_another_kind_is_refused(prompt: Any) -> None:
    """The error names the field, not pydantic's idea of it."""
    with pytest.raises(ApiError) as caught:
        _completion(prompt=prompt)
    assert caught.value.status == 400
    assert (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*USER, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [5]}, "messages[0]"),
        ({"n": 0}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"timeout": 0}, "timeout"),
        ({"priority": 1.5}, "priority"),
        ({"user": 5}, "user"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages[0].tool_calls[0].function"),
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
    ],
)
def test_bad_value_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """A caller must see which field to mend."""
    error = _refused(**fields)
    assert (error.status, error.kind, error.param) == (400, "invalid_request_error", param)
    assert param.split("[")[0] in error.message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 2),
        ("echo", True),
        ("suffix", "end"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("repetition_penalty", 1.1),
        ("min_p", 0.1),
        ("guided_json", {}),
        ("reasoning_effort", "high"),
    ],
)
def test_parameter_that_would_change_the_answer_is_refused(name: str, value: Any) -> None:
    """Ignoring it would give an answer nobody asked for."""
    error = _refused(**{name: value})
    assert (error.status, error.code, error.param) == (400, "unsupported_parameter", name)
    assert "not supported" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "logprobs": False, "echo": False, "suffix": None, "best_of": 1, "tools": [], "tool_choice": "none"},
        {"parallel_tool_calls": True, "reasoning_effort": "none", "skip_special_tokens": True},
        {"response_format": {"type": "text"}, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0},
        {"metadata": {"a": "b"}, "store": True, "service_tier": "auto", "no_such_field": [1, 2]},
        {"stream": None, "stop": None, "temperature": None, "max_tokens": None, "stop_token_ids": []},
    ],
)
def test_harmless_fields_are_accepted(fields: dict[str, Any]) -> None:
    """Clients send defaults and labels; they change nothing."""
    assert _chat(**fields) == _chat()


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]
)
def test_message_parts_other_than_text_are_unsupported(part: dict[str, Any]) -> None:
    """The model reads text."""
    error = _refused(messages=[{"role": "user", "content": [part]}])
    assert (error.code, error.param) == ("unsupported_parameter", "messages[0].content")


def test_parameters_of_the_other_endpoint_are_refused() -> None:
    """A completion has no tools; what it would have to do with them nobody knows."""
    for name, value in (("tools", [{"type": "function", "function": {"name": "f"}}]), ("top_logprobs", 3), ("tool_choice", "required")):
        with pytest.raises(ApiError) as caught:
            _completion(**{name: value})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)


def test_completion_refuses_what_it_can_not_compute() -> None:
    """More answers than are given, and log-probabilities of a prompt that is not computed again."""
    for fields, param in (({"best_of": 3}, "best_of"), ({"n": 2, "best_of": 3}, "best_of"), ({"echo": True, "logprobs": 0}, "echo")):
        with pytest.raises(ApiError) as caught:
            _completion(**fields)
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    assert _completion(n=2, best_of=2, echo=True).n == 2


def test_logprobs_are_spelled_differently_by_endpoint() -> None:
    """A boolean and a number for chat, one number for completions; 0 is not none."""
    assert _chat(logprobs=True).sampling.logprobs == 0
    assert _chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert _chat(logprobs=False).sampling.logprobs is None
    assert _completion(logprobs=0).sampling.logprobs == 0
    assert _completion().sampling.logprobs is None


def test_what_shapes_the_draw_reaches_the_sampling() -> None:
    """Biases by token id, penalties, stop tokens."""
    ask = _chat(presence_penalty=0.5, frequency_penalty=-1, logit_bias={"7": -100, "8": 1.5}, stop_token_ids=[3, 4], n=3)
    assert (ask.sampling.presence_penalty, ask.sampling.frequency_penalty) == (0.5, -1.0)
    assert ask.sampling.logit_bias == ((7, -100.0), (8, 1.5))
    assert (ask.stop_tokens, ask.n) == ((3, 4), 3)


def test_what_a_caller_says_of_itself_is_taken() -> None:
    """For fairness, affinity and order; the newer names of OpenAI's fields too."""
    ask = _chat(user="u", prompt_cache_key="s", priority=-3, timeout=2.5)
    assert (ask.user, ask.session, ask.priority, ask.timeout_s) == ("u", "s", -3, 2.5)
    assert _chat(safety_identifier="v").user == "v"
    assert _chat(user="").user == ""


def test_tools_and_tool_messages_become_plain() -> None:
    """Templates take arguments as objects, and only the fields that were given."""
    function = {"name": "weather", "parameters": {"type": "object"}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
    ask = _chat(tools=[{"type": "function", "function": function}], messages=[*USER, {"role": "assistant", "tool_calls": [call]}, result])
    assert ask.tools == ({"type": "function", "function": function},)
    assert ask.messages[1]["content"] == ""
    assert ask.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert ask.messages[2] == result
    assert _chat(tools=[{"type": "function", "function": function}], tool_choice="none").tools == ()
    assert not _chat(parallel_tool_calls=False).parallel_tool_calls
    error = _refused(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}])
    assert error.param == "messages[0].tool_calls[0].function.arguments"


def test_older_form_of_calls_is_unsupported() -> None:
    """Dropping them would change what the model sees."""
    for message in (
        {"role": "function", "name": "f", "content": "5"},
        {"role": "assistant", "content": None, "function_call": {"name": "f"}},
    ):
        assert _refused(messages=[*USER, message]).code == "unsupported_parameter"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"a": NaN}', b'{"model": "\\ud800"}', b"\xff\xfe", b"[" * 100_000, b"5", b"null", b"[1]", b'"x"'],
)
def test_malformed_json_is_refused(body: bytes) -> None:
    """Broken syntax, broken Unicode, bottomless nesting and non-objects alike."""
    for parse in (parse_chat, parse_completion):
        with pytest.raises(ApiError) as caught:
            parse(body, model="m", seed=0)
        assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_unknown_model_is_not_found() -> None:
    """OpenAI's status and code for it."""
    error = _refused(model="gpt-5")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    assert "gpt-5" in error.message


def test_missing_fields_are_named() -> None:
    """A body without model, without messages, without prompt."""
    for parse, body, param in (
        (parse_chat, {}, "model"),
        (parse_chat, {"model": "m"}, "messages"),
        (parse_completion, {"model": "m"}, "prompt"),
    ):
        with pytest.raises(ApiError) as caught:
            parse(json.dumps(body).encode(), model="m", seed=0)
        assert (caught.value.param, caught.value.code) == (param, "missing_required_parameter")


def test_tokenize_takes_text_or_messages() -> None:
    """Exactly one of them."""
    assert parse_tokenize(b'{"text": "x"}') == TokenizeAsk(text="x")
    assert parse_tokenize(json.dumps({"messages": USER}).encode()) == TokenizeAsk(messages=tuple(USER))
    for body in (b"{}", json.dumps({"text": "x", "messages": USER}).encode(), b'{"text": 5}', b'{"messages": []}'):
        with pytest.raises(ApiError) as caught:
            parse_tokenize(body)
        assert caught.value.status == 400
