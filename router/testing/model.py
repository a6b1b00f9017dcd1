"""A model directory small enough to make in a test: a byte-level tokenizer trained on two sentences, and no weights."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from router.text.model import TextModel

NAME = "tiny"
START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = ["the quick brown fox jumps over the lazy dog", "a key names a block and a block is a pure function of its key"]


def write_tiny_model(directory: Path, context_tokens: int = 512) -> Path:
    """Write the files a router reads into `directory`; the same bytes every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in (START, END)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    end = tokenizer.token_to_id(END)
    tokenizer.save(str(directory / "tokenizer.json"))
    files = {
        "config.json": {"max_position_embeddings": context_tokens, "eos_token_id": end},
        "generation_config.json": {"eos_token_id": end},
        "tokenizer_config.json": {"eos_token": END, "bos_token": START, "chat_template": TEMPLATE},
    }
    for name, value in files.items():
        (directory / name).write_text(json.dumps(value))
    return directory


def tiny_model(directory: Path, context_tokens: int = 512) -> TextModel:
    """The model of `write_tiny_model`, loaded."""
    return TextModel.load(write_tiny_model(directory, context_tokens), NAME)
