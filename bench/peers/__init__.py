"""Public stores beside which `bench.pool` measures kvpool. Each file is run by the Python of that store's own virtual environment."""
