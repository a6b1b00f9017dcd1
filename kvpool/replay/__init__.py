"""WHAT would have happened: recorded and public traces, and a simulated cluster that runs production's own decisions over them."""
