"""The prefill worker: the engine of `kvpool.engine` in the prefill role."""
