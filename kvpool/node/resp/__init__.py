"""A front door for clients of Redis: values by name in the pool of this node (docs/resp.md)."""
