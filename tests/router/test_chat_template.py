"""Equal conversations must give equal prompts, here and in `transformers`; a template is not to be trusted."""

from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from router.testing.model import TEMPLATE, tiny_model
from router.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def test_render_of_a_conversation_opens_the_answer(tmp_path: Path) -> None:
    """The prompt ends where the assistant is to speak."""
    rendered = ChatTemplate(TEMPLATE, SPECIAL).render([{"role": "user", "content": "hi"}])
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny_model(tmp_path).render([{"role": "user", "content": "hi"}]) == rendered


def test_block_tags_leave_no_blank_lines() -> None:
    """`transformers` trims blocks; a stray newline would be other tokens and other keys."""
    source = "{% for m in messages %}\n    {% if true %}\n{{ m['content'] }}\n    {% endif %}\n{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": "x"}]) == "x\n"


def test_special_tokens_and_helpers_are_there() -> None:
    """What templates in the wild use: special tokens, tojson without escapes, break, generation, dates."""
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') }}{% if tools is none %}no tools{% endif %}"
    )
    template = ChatTemplate(source, SPECIAL, strftime_now=lambda pattern: pattern.replace("%Y", "2024"))
    messages = [{"role": "user", "content": "<é>"}, {"role": "user", "content": "second"}]
    assert template.render(messages) == '<s>{"role": "user", "content": "<é>"}2024no tools'


def test_template_that_refuses_says_why() -> None:
    """`raise_exception` is how a template speaks to the caller."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ConfigError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[0].update(role='system') }}"])
def test_template_that_reaches_out_is_stopped(source: str) -> None:
    """A model's template is someone else's program."""
    template = ChatTemplate(source, {})
    with pytest.raises(ConfigError, match="refuses these messages"):
        template.render([{"role": "user", "content": "x"}])


def test_broken_template_is_a_clear_error() -> None:
    """A model directory with a broken template must not start."""
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% for %}", {})
