"""Numbers that change over a run, as functions of progress: the share of the run that is done, in [0, 1].

Progress is read when an update begins: the first update gets `start` exactly, and `end` belongs to the finished run,
so a learning rate that falls to 0 is small but not 0 in the last update.
"""

from __future__ import annotations


def linear(start: float, end: float, progress: float) -> float:
    """From start to end, both met exactly; constant outside the run."""
    progress = min(max(progress, 0.0), 1.0)
    return (1 - progress) * start + progress * end
