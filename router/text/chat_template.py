"""A model's chat template, rendered the way `transformers` renders it, but in a sandbox and without `transformers`.

The environment must agree with `apply_chat_template` to the character (trimmed blocks, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, `{% break %}`, `{% generation %}`), because equal conversations must give equal tokens on every path into the pool.
A template comes with the model, so it is not trusted: it runs immutable and sandboxed.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvpool.errors import ConfigError


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], strftime_now: Callable[[str], str] = _now) -> None:
        """Compile `source`; raises `ConfigError` when it isn't valid Jinja."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = strftime_now
        self._special_tokens = dict(special_tokens)
        self.source = source
        try:
            self._template = environment.from_string(source)
            self.takes_tools = "tools" in find_undeclared_variables(environment.parse(source))
            """Whether it reads `tools`; one that doesn't would leave them out silently."""
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt text for `messages` (`role`, `content`, ...) and `tools`, open for the assistant's answer.

        Raises `ConfigError` when the template refuses the conversation; the message is the template's own.
        """
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise ConfigError(f"the model's chat template refuses these messages: {error}") from error
