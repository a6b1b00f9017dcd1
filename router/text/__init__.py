"""Text in, token ids out, and back again piece by piece."""
