"""One shuffle over the batches of several ranks: every rank draws the same permutation and keeps its own part.

Rank r of R has the lanes [r·B, (r+1)·B) of R·B. A batch has K pieces (steps or chunks) of each lane; piece k of lane b
has the number k·R·B + b in the whole and k·B + b - r·B on its own rank, so a rank with all lanes is the case R = 1.
"""

from __future__ import annotations

from torch import Tensor

MOSTLY = 0.65  # share of pieces with a live row from which on the others stay: ends of short episodes are fewer


def own_pieces(order: Tensor, per_lane: int, minibatches: int, rank: int, size: int) -> tuple[Tensor, list[int]]:
    """A permutation of all ranks' pieces -> that of this rank's, and how many of them are in each minibatch.

    `per_lane` is K. Minibatches are equal parts of the permutation, or differ by one piece; a rank may have no piece in
    some of them.
    """
    assert len(order) % (per_lane * size) == 0 and minibatches <= len(order), (len(order), per_lane, size, minibatches)
    if size == 1:
        return order, [len(part) for part in order.tensor_split(minibatches)]
    every = len(order) // per_lane  # R·B
    lanes = every // size
    piece, lane = order // every, order % every - rank * lanes
    own = (lane >= 0) & (lane < lanes)
    return (piece * lanes + lane)[own], [int(part.sum()) for part in own.tensor_split(minibatches)]


def without_dead(order: Tensor, sizes: list[int], alive: Tensor) -> tuple[Tensor, list[int]]:
    """The result of `own_pieces` without pieces that have no live row, if these are many; `alive` says of each piece.

    Nothing is learnt from them, and what is left out depends on this rank's own pieces alone. A minibatch that has only
    dead pieces keeps one: it has a gradient, of zeros, on one rank as on several.
    """
    keep = alive[order]
    if keep.sum() >= MOSTLY * len(keep):
        return order, sizes
    parts = keep.split(sizes)
    for part in parts:
        if len(part) and not part.any():
            part[0] = True
    return order[keep], [int(part.sum()) for part in parts]
