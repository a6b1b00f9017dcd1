"""The oracle: one process, no cache, no kvpool in the path; `transformers` generates and its tokens are the truth.

`python -m kvpool.engine.reference --model smollm2 < requests.jsonl > answers.jsonl`: each line in is
`{"prompt": [ids], "max_tokens": n}`, each line out `{"tokens": [ids], "seconds": s}`, greedy, in order, ending at the model's own
end-of-text tokens.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

from kvpool.config.models import resolve_model
from kvpool.engine.convert import stay_offline
from kvpool.engine.paged.store import TORCH_DTYPES
from kvpool.errors import KvpoolError
from kvpool.units import SECOND


class Reference:
    """A plain `transformers` model that recomputes every prompt from its first token."""

    def __init__(self, directory: Path, dtype: str) -> None:
        stay_offline()
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as chatter

        chatter.disable_progress_bar()
        network = AutoModelForCausalLM.from_pretrained(directory, dtype=TORCH_DTYPES[dtype], local_files_only=True)
        self._network: Any = network.eval()

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy continuation of `prompt`, at most `max_tokens` tokens."""
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens


@click.command()
@click.option("--model", default="smollm2", show_default=True)
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(sorted(TORCH_DTYPES)))
@click.option("--threads", default=1, show_default=True)
def main(model: str, dtype: str, threads: int) -> None:
    """Answer requests from stdin, one JSON object a line."""
    torch.set_num_threads(threads)
    try:
        directory = resolve_model(model, deadline_ns=time.monotonic_ns() + 300 * SECOND)
    except KvpoolError as error:
        sys.exit(f"reference: {error}")
    reference = Reference(directory, dtype)
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        tokens = reference.generate(request["prompt"], request["max_tokens"])
        print(json.dumps({"tokens": tokens, "seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    main()
