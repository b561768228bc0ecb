"""Where a run was resumed, and which fields that changed: read from records of kind "resume", for figures and pages.

The records may come from another person: text is of bounded length, and what shows it escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.core.printable import shown

MOST = 200  # of one run that are shown: the newest
FIELDS, LONGEST = 3, 24  # of one resume that are named, and characters of a value
LABEL = 56  # characters beside a line
NEAR = 0.03  # of the axis: marks that are closer share a label


@dataclass(frozen=True)
class Mark:
    env_steps: float
    wall_s: float
    text: str  # "algo.lr 0.001 → 0.0001"; "" if no field was changed


def mark_of(record: Mapping[str, Any], env_steps: float, wall_s: float) -> Mark | None:
    """Of a record whose numbers have been read."""
    if not math.isfinite(env_steps + wall_s):
        return None
    changed = record.get("changed")
    changed = changed if isinstance(changed, Mapping) else {}
    pairs = {name: pair for name, pair in changed.items() if isinstance(pair, Sequence) and len(pair) == 2}
    told = [f"{str(name)[:60]} {_short(old)} → {_short(new)}" for name, (old, new) in list(pairs.items())[:FIELDS]]
    more = f" and {len(pairs) - FIELDS} more" if len(pairs) > FIELDS else ""
    return Mark(env_steps, wall_s, ", ".join(told) + more)


def _short(value: Any) -> str:
    words = value if isinstance(value, str) else shown(value)
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"


def labels(marks: Iterable[tuple[float, str]], last: float) -> list[tuple[float, str]]:
    """Places and texts, those that are close to each other as one, so that no label covers another."""
    found: list[tuple[float, str]] = []
    for place, text in sorted(each for each in marks if each[1]):
        if found and place - found[-1][0] < NEAR * last:
            if text not in found[-1][1]:
                found[-1] = found[-1][0], f"{found[-1][1]}; {text}"
        else:
            found.append((place, text))
    return [(place, text if len(text) <= LABEL else f"{text[:LABEL]}…") for place, text in found]
