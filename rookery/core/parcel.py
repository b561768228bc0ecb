"""A parcel: the items that an actor hands over for a replay memory, in arrays with room for the most there can be.

`count` says how many items and how many new frames are in it (`tables/builder.py`); what lies behind them is not read.
"""

from __future__ import annotations

from rookery.core.types import Arrays


def filled(arrays: Arrays) -> Arrays:
    """Without the room behind the items and the frames, if it is a parcel: views. It is less to send."""
    if "count" not in arrays:
        return arrays
    items, frames = arrays["count"].tolist()
    rows = {"frames": frames, "first_frame": None, "count": None}
    return {path: array[: rows.get(path.partition("/")[0], items)] for path, array in arrays.items()}
