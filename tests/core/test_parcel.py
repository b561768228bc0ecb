"""What a parcel holds, without the room behind it."""

from __future__ import annotations

import numpy as np
import pytest
from support_parcels import MIXED, STACKED, VECTOR, Maker, replay
from support_unrolls import unroll

from rookery.core.parcel import filled
from rookery.core.types import EnvSpec
from rookery.tables.memory import ReplayMemory


@pytest.mark.parametrize("spec", [VECTOR, STACKED, MIXED], ids=["vector", "stacked", "mixed"])
@pytest.mark.parametrize("kind", [{"n_step": 2}, {"sequence": 3, "burn_in": 1, "overlap": 1}], ids=["steps", "rows"])
def test_a_memory_takes_in_the_same_from_it(spec: EnvSpec, kind: dict[str, int]):
    plan = replay(capacity=30, batch=5, **kind)
    maker = Maker(spec, plan, 8, 9, 0, [0], 6)
    memories = [ReplayMemory(plan, maker.shapes, spec, 1, seed=4) for _ in range(2)]
    for items, frames in ((3, 4), (0, 2), (8, 9), (5, 0)):
        parcel, _ = maker.make(items, frames if maker.seen else 0, 2.0)
        sent = filled(parcel)
        memories[0].insert(parcel, 0)
        memories[1].insert(sent, 0)
        assert sent["action"].shape[0] == items and sent["count"].tolist() == parcel["count"].tolist()
        if frames and maker.seen:
            assert sum(a.nbytes for a in sent.values()) < sum(a.nbytes for a in parcel.values()) or items == 8
    for name, array in memories[0].arrays().items():
        np.testing.assert_array_equal(array, memories[1].arrays()[name], err_msg=name)


def test_an_unroll_is_sent_as_it_is():
    arrays = unroll(3)
    assert filled(arrays) is arrays
