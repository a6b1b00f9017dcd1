"""Parameters that would change the answer and that an endpoint doesn't have: refused unless they hold the value that changes nothing.

Ignoring one silently would give an answer the caller did not ask for. Everything not in this table (`metadata`, `store`, ...)
has no say in the text and is ignored.
"""

from collections.abc import Mapping
from typing import Any

from router.api.errors import unsupported

_SAMPLER = "the sampler takes temperature, top_p, top_k, seed, logit_bias and the presence and frequency penalties"
_TEXT = "only plain text is generated"
_TEMPLATE = "the model's own template is used"
_OPEN = "the prompt always opens a new answer"
_FREE = "answers are not bound to a grammar"
_DETAIL = "stop strings and special tokens are left out of the text"

_COMPLETIONS, _CHAT = "it is a parameter of /v1/completions", "it is a parameter of /v1/chat/completions"

_NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "echo": ((False,), _COMPLETIONS),
    "best_of": ((1,), _COMPLETIONS),
    "top_logprobs": ((), _CHAT),
    "tools": (([],), _CHAT),
    "tool_choice": (("none", "auto"), _CHAT),
    "suffix": (("",), "the model does not fill in the middle"),
    "functions": (([],), "use tools"),
    "function_call": (("none", "auto"), "use tool_choice"),
    "response_format": (({"type": "text"},), _TEXT),
    "modalities": ((["text"],), _TEXT),
    "audio": ((), _TEXT),
    "web_search_options": ((), "the server reads nothing but the request"),
    "reasoning_effort": (("none",), "the model has no such setting"),
    "verbosity": (("medium",), "the model has no such setting"),
    "repetition_penalty": ((1,), _SAMPLER),
    "length_penalty": ((1,), _SAMPLER),
    "min_p": ((0,), _SAMPLER),
    "typical_p": ((1,), _SAMPLER),
    "use_beam_search": ((False,), _SAMPLER),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "min_tokens": ((0,), "use ignore_eos to generate max_tokens tokens"),
    "prompt_logprobs": ((), "prompts are not computed again, so their log-probabilities are not known"),
    "guided_json": ((), _FREE),
    "guided_regex": ((), _FREE),
    "guided_choice": ((), _FREE),
    "guided_grammar": ((), _FREE),
    "structured_outputs": ((), _FREE),
    "include_stop_str_in_output": ((False,), _DETAIL),
    "skip_special_tokens": ((True,), _DETAIL),
    "truncate_prompt_tokens": ((), "prompts are taken whole"),
    "add_special_tokens": ((), "the model's own rule is used"),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": (({},), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "continue_final_message": ((False,), _OPEN),
    "add_generation_prompt": ((True,), _OPEN),
}


def check_supported(fields: Mapping[str, Any]) -> None:
    """Raise `unsupported_parameter` for the first of `fields`, which the endpoint doesn't have, that would change the answer."""
    for name, value in fields.items():
        if name in _NEUTRAL and value is not None and not _is_neutral(value, _NEUTRAL[name][0]):
            raise unsupported(name, _NEUTRAL[name][1])


def unsupported_parameters() -> tuple[str, ...]:
    """Names of the refused parameters, for the documentation's test."""
    return tuple(_NEUTRAL)


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Equality that tells False from 0 and True from 1."""
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
