"""Whose prompt a worker computes next: the one with the least left to compute, but whoever waits gains on those that come later. Pure.

Theory. Serving the shortest remaining work first gives the least mean wait, and what a cache holds of a prompt counts as done, so those
that find much come early. A stream of short prompts would starve a long one, though. So a prompt's place is what is left of it plus
`AGING` times what the worker had computed, of all prompts, when it came. The lowest place is next::

    place = left + AGING x computed before it came

A prompt with L tokens left is passed only by those that come before the worker has computed L / `AGING` tokens more, and only while
they have less left than L themselves; whoever comes later has a higher place, however short it is. So with n prompts on a worker at
most, later ones delay it by less than (1 / `AGING` + n) x L tokens. Age is counted in work and not in time: that needs no clock and
no speed, and while nothing is computed nobody is passed.

The engine's scheduler, the simulated nodes and the router's estimate of a worker's queue all take it from here.
"""

AGING = 0.02
"""50 tokens computed for others count as much as a token less to compute."""


def place(left: float, before: float) -> float:
    """The lower, the sooner: `left` to compute of it, `before` computed by the worker when it came, both in tokens or both in seconds."""
    return left + AGING * before
