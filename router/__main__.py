"""`python -m router`: serve OpenAI's API for one model of a cluster."""

from router.main import main

main()
