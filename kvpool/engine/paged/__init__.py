"""KV in blocks: who holds which (`blocks`), where they lie (`placement`, `store`, `windows`), how a pass reads them (`attention`)."""
