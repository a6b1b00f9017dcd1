"""`python -m kvpool.cli` is `kvpool`."""

from kvpool.cli.main import main

main()
