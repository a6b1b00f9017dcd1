"""Parameters that would change the answer and are not implemented: refused unless they hold the value that changes nothing.

Ignoring one silently would give an answer the caller did not ask for. Everything not in this table (`user`, `metadata`, `store`, ...)
has no say in the text and is ignored.
"""

from collections.abc import Mapping
from typing import Any

from router.api.errors import unsupported

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "send one request per answer"),
    "best_of": ((1,), "send one request per answer"),
    "logprobs": ((False,), "log-probabilities are not computed"),
    "top_logprobs": ((), "log-probabilities are not computed"),
    "echo": ((False,), "put the prompt before the answer yourself"),
    "suffix": (("",), "the model does not fill in the middle"),
    "tools": (([],), "tool calls are not implemented"),
    "tool_choice": (("none", "auto"), "tool calls are not implemented"),
    "functions": (([],), "tool calls are not implemented"),
    "function_call": (("none", "auto"), "tool calls are not implemented"),
    "response_format": (({"type": "text"},), "only plain text is generated"),
    "modalities": ((["text"],), "only plain text is generated"),
    "audio": ((), "only plain text is generated"),
    "logit_bias": (({},), "the sampler takes temperature, top_p, top_k and seed"),
    "presence_penalty": ((0,), "the sampler takes temperature, top_p, top_k and seed"),
    "frequency_penalty": ((0,), "the sampler takes temperature, top_p, top_k and seed"),
    "repetition_penalty": ((1,), "the sampler takes temperature, top_p, top_k and seed"),
    "min_p": ((0,), "the sampler takes temperature, top_p, top_k and seed"),
    "min_tokens": ((0,), "use ignore_eos to generate max_tokens tokens"),
    "stop_token_ids": (([],), "use stop strings"),
    "web_search_options": ((), "the server reads nothing but the request"),
    "chat_template": ((), "the model's own template is used"),
    "chat_template_kwargs": (({},), "the model's own template is used"),
    "continue_final_message": ((False,), "the prompt always opens a new answer"),
    "add_generation_prompt": ((True,), "the prompt always opens a new answer"),
}


def check_supported(fields: Mapping[str, Any]) -> None:
    """Raise `unsupported_parameter` for the first field that asks for something not implemented."""
    for name, value in fields.items():
        if name in _NEUTRAL and value is not None and not _is_neutral(value, _NEUTRAL[name][0]):
            raise unsupported(name, _NEUTRAL[name][1])


def unsupported_parameters() -> tuple[str, ...]:
    """Names of the refused parameters, for the documentation's test."""
    return tuple(_NEUTRAL)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0 and True from 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
