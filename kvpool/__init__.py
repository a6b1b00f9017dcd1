"""kvpool: a disaggregated, distributed KV cache service for LLM inference."""
