"""GGUF to a dense Hugging Face directory, offline: `python -m kvpool.engine.convert SRC.gguf OUT`.

The weights are dequantised to float32, which holds every dequantised value exactly; tokenizer and chat template come from
the GGUF too. `kvpool.config.models` runs this in a process of its own and caches the result.
"""

import os
import sys
from pathlib import Path


def convert(source: Path, out: Path) -> None:
    """Write the model and tokenizer of the GGUF file `source` to the new directory `out`."""
    stay_offline()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    torch.set_num_threads(1)
    place = {"gguf_file": source.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **place
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def stay_offline() -> None:
    """Forbid the model libraries any network; call before importing `transformers`."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def main(arguments: list[str]) -> int:
    """Convert; returns the exit status."""
    if len(arguments) != 2 or not arguments[0].endswith(".gguf"):
        print("usage: python -m kvpool.engine.convert SRC.gguf OUT", file=sys.stderr)
        return 2
    convert(Path(arguments[0]), Path(arguments[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
