"""Other people's engines as clients of the pool: one room for each, loaded by the engine itself."""
