"""`kvpool bench`: what the pool moves on these machines, beside what they can do at all."""
