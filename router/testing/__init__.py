"""Twins for tests: scripted workers, a cluster changed by hand, virtual time, a tiny model, a router on a real socket."""
