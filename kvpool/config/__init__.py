"""Settings and where things are on disk; no torch."""
