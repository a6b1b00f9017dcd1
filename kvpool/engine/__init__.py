"""The inference engine that prefill and decode workers share: model, KV cache, scheduler, sampling, pool access."""
