"""Decode tokens per second of vLLM's CPU build at 8 streams, once a line that comes in. Run by `bench.engine` in vLLM's own environment.

Arguments: model directory, dtype, prompt tokens, tokens to generate, threads. Prints one JSON object when it is ready, and one a line.
"""

import json
import os
import random
import sys
import time
from importlib import import_module
from typing import Any


def main() -> None:
    directory, dtype, prompt, tokens, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    os.environ |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(model=directory, dtype=dtype, enforce_eager=True, max_model_len=2048, enable_prefix_caching=False)
    rng = random.Random(0)

    def run(count: int) -> float:
        prompts = [{"prompt_token_ids": rng.choices(range(100, 40000), k=prompt)} for _ in range(8)]
        began = time.perf_counter()
        llm.generate(prompts, vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - began

    run(tokens)
    print(json.dumps({"tokens_per_s": 0.0}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"tokens_per_s": 8 * (tokens - 1) / (run(tokens) - run(1))}), flush=True)


if __name__ == "__main__":
    main()
