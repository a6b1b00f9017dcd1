"""Contract kits: the behaviour every adapter and its in-memory twin must share, as tests to subclass."""
