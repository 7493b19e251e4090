"""Bisection over whole numbers."""

from collections.abc import Callable


def largest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest k from `low` to `high` - 1 with holds(k), where it holds up to some k and not after it.

    Neither end is asked: `low` holds (or is the answer where nothing does), `high` does not.
    """
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
