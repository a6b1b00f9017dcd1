"""A model directory is read right, or refused with the file's name."""

import json
import os
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from router.testing.model import END, TEMPLATE, tiny_model, write_tiny_model
from router.text.model import TextModel


def _edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_text_survives_encoding_and_decoding(tmp_path: Path) -> None:
    """Tokens of a prompt mean its text, any script."""
    model = tiny_model(tmp_path)
    text = "a block, 你好, 🎉"
    assert model.decode(model.encode(text, rendered=False)) == text


def test_special_token_in_a_rendered_conversation_is_one_token(tmp_path: Path) -> None:
    """The template spells special tokens as text; they must come back as themselves, and without text."""
    model = tiny_model(tmp_path)
    tokens = model.encode(f"hi{END}", rendered=True)
    assert tokens[-1] == model.stop_tokens[0]
    assert model.decode(tokens) == "hi"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [({"eos_token_id": [3, 5]}, {}, {1, 3, 5}), ({}, {"eos_token_id": 4}, {1, 4}), ({}, {"eos_token_id": None}, {1})],
)
def test_stop_tokens_come_from_every_file_that_names_them(
    tmp_path: Path, generation: dict[str, object], config: dict[str, object], expected: set[int]
) -> None:
    """A chat model ends its turn with the tokenizer's end token even where the model's own is another."""
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    _edit(tmp_path / "config.json", **config)
    assert set(TextModel.load(tmp_path, "m").stop_tokens) == expected


def test_template_file_wins_over_the_one_inside_the_config(tmp_path: Path) -> None:
    """Newer models keep it in a file of its own."""
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert TextModel.load(tmp_path, "m").render([{"role": "user", "content": "x"}]) == "from the file"


def test_template_among_several_is_the_default_one(tmp_path: Path) -> None:
    """Some models name several."""
    write_tiny_model(tmp_path)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    _edit(tmp_path / "tokenizer_config.json", chat_template=named)
    assert TextModel.load(tmp_path, "m").render([{"role": "user", "content": "x"}]).startswith("<|im_start|>user")


def test_model_without_template_says_so(tmp_path: Path) -> None:
    """A base model serves completions only."""
    write_tiny_model(tmp_path)
    _edit(tmp_path / "tokenizer_config.json", chat_template=None, eos_token={"content": END})
    model = TextModel.load(tmp_path, "m")
    assert model.stop_tokens == (1,)
    with pytest.raises(ConfigError, match="no chat template"):
        model.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("config.json", "{", "can't be read"),
        ("config.json", "[]", "JSON object"),
        ("config.json", "{}", "max_position_embeddings"),
        ("config.json", None, "config.json is missing"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "not a tokenizer"),
    ],
)
def test_broken_directory_is_refused_by_file(tmp_path: Path, name: str, content: str | None, complaint: str) -> None:
    """Whoever started the router must see which file to mend."""
    write_tiny_model(tmp_path)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        TextModel.load(tmp_path, "m")


def _smollm2() -> Path | None:
    """A converted SmolLM2 directory, if this machine has one."""
    named = os.environ.get("KVPOOL_TEST_MODEL")
    cache = Path(os.environ.get("KVPOOL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpool")
    found = [Path(named)] if named else [path.parent for path in sorted(cache.glob("models/*/tokenizer.json"))]
    return found[0] if found else None


@pytest.mark.skipif(_smollm2() is None, reason="no converted SmolLM2: run `kvpool up` once, or set KVPOOL_TEST_MODEL")
def test_smollm2_conversation_has_the_tokens_transformers_gives_it() -> None:
    """These ids were made by `apply_chat_template`; the workers' proof of equal answers rests on them."""
    directory = _smollm2()
    assert directory is not None
    model = TextModel.load(directory, "smollm2")
    rendered = model.render([{"role": "user", "content": "What is the capital of France?"}])
    system = (1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198)
    user = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
    assert model.encode(rendered, rendered=True) == system + user
    assert model.stop_tokens == (2,)
    assert model.context_tokens == 8192
