"""Everything the router knows of a model: its tokenizer, chat template, context length and stop tokens, read from its directory.

No weights and no `transformers`: `tokenizer.json` is the whole tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvpool.errors import ConfigError
from router.text.chat_template import ChatTemplate
from router.text.detokenizer import Detokenizer
from router.text.spelling import Spelling
from router.text.tool_calls import OPEN


class TextModel:
    """The text side of one served model."""

    def __init__(
        self, *, name: str, tokenizer: Tokenizer, template: ChatTemplate | None, context_tokens: int, stop_tokens: Sequence[int]
    ) -> None:
        """`context_tokens` bounds prompt and answer together; an answer ends after any of `stop_tokens`."""
        self.name = name
        self.context_tokens = context_tokens
        self.stop_tokens = tuple(stop_tokens)
        self.vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
        """Number of token ids: valid ids are below it."""
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._spelling = Spelling(tokenizer)
        self._special = frozenset(token for token, entry in added.items() if entry.special)

    @classmethod
    def load(cls, directory: Path, name: str) -> "TextModel":
        """Read `directory`; raises `ConfigError` naming the file that is missing or wrong."""
        config = _read_json(directory / "config.json")
        generation = _read_json(directory / "generation_config.json", optional=True)
        settings = _read_json(directory / "tokenizer_config.json", optional=True)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: --model must name a directory with a tokenizer.json, or an alias such as smollm2")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        context = config.get("max_position_embeddings")
        if not isinstance(context, int) or context < 2:
            raise ConfigError(f"{directory / 'config.json'} has no usable max_position_embeddings (got {context!r})")
        special = _special_tokens(settings)
        source = _template_source(directory, settings)
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=ChatTemplate(source, special) if source is not None else None,
            context_tokens=context,
            stop_tokens=_stop_tokens(tokenizer, config, generation, special),
        )

    @property
    def tools_refused(self) -> str | None:
        """Why tools can't be used with this model; None when they can."""
        if self._template is None or not self._template.takes_tools:
            return f"the chat template of {self.name} takes no tools"
        if OPEN not in self._template.source:
            return f"the chat template of {self.name} asks for tool calls in a form other than {OPEN}, which is the one read here"
        return None

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """The prompt text of a conversation; raises `ConfigError` when the model has no chat template or refuses it."""
        if self._template is None:
            raise ConfigError(f"model {self.name} has no chat template; use /v1/completions")
        return self._template.render(messages, tools)

    def spell(self, token: int) -> tuple[str, bytes]:
        """One token by itself: its text, in which broken characters are U+FFFD, and its bytes."""
        return self._spelling.of(token)

    def encode(self, text: str, *, rendered: bool) -> tuple[int, ...]:
        """Token ids of `text`; a `rendered` conversation already spells its special tokens. Releases the GIL for long texts."""
        return tuple(self._tokenizer.encode_batch([text], add_special_tokens=not rendered)[0].ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`, special tokens skipped."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """An incremental decoder for an answer that follows `context`."""
        return Detokenizer(self.decode, self._special | frozenset(self.stop_tokens), context)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing: --model must name a model directory, or an alias such as smollm2") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ... as text; they are spelled as strings or as objects with `content`."""
    found = {}
    for field in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = settings.get(field)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[field] = text
    return found


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` wins over `tokenizer_config.json`, where several named templates may stand: the one called default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    inside = settings.get("chat_template")
    if isinstance(inside, list):
        inside = next((entry.get("template") for entry in inside if entry.get("name") == "default"), None)
    return inside if isinstance(inside, str) else None


def _stop_tokens(
    tokenizer: Tokenizer, config: Mapping[str, Any], generation: Mapping[str, Any], special: Mapping[str, str]
) -> tuple[int, ...]:
    """Ids that end an answer: the model's end tokens, and the tokenizer's (for chat models the end of a turn)."""
    found: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        if value is not None:
            found.update([value] if isinstance(value, int) else value)
            break
    end = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if end is not None:
        found.add(end)
    return tuple(sorted(found))
