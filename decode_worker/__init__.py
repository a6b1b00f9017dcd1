"""The decode worker: the engine of `kvpool.engine` in the decode role."""
