"""What will and won't work between an engine and the pool, told before the engine is started (`kvpool connect-check`).

`probe.py` runs in the engine's interpreter and reports facts; `pool.py` looks at the pool; one file per engine decides, purely, what they
come to; each of its answers is a `Line`.
"""
