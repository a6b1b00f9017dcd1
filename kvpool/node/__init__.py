"""The imperative shell of one pool node: `python -m kvpool.node`."""
