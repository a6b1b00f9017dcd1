"""Stock vLLM servers as workers: found by their URLs, asked in OpenAI's words, followed by their KV events (docs/stock-engines.md)."""
