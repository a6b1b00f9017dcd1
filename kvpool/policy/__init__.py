"""WHO leaves and WHERE things go: eviction order and placement, pure decisions fed with events."""
