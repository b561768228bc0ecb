"""From acting to the memory's items: the start priorities that travel with them are those the learner would compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_dpg import SPEC, built, score
from support_lanes import BOX, ScriptedLanes

from rookery.core import tree
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.types import Sequences, Transitions
from rookery.roles.producer import Producer, empty_arrays, handover_shapes

ESTIMATE = ReplayConfig(batch=16, min_size=16, start="actor")


def items_of(learner, unrolls: int = 8) -> dict[str, torch.Tensor]:
    """All items that one actor makes in a few unrolls, with weights that are also those of the target networks."""
    alg, nets = learner.algorithm, learner.nets
    for name in ("policy", "critic"):
        nets[f"target_{name}"].load_state_dict(nets[name].state_dict())
    producer = Producer(alg, nets, ScriptedLanes(action=BOX), seed=3)
    producer.begin(0, "0")
    arrays = empty_arrays(handover_shapes(SPEC, alg.plan(), 4, alg.initial_state(nets, 1)))
    parts = []
    for _ in range(unrolls):
        producer.fill(arrays, 0)
        count = int(arrays["count"][0])
        parts.append({path: torch.from_numpy(x[:count].copy()) for path, x in arrays.items() if path != "count"})
    return {path: torch.cat([part[path] for part in parts]) for path in parts[0]}


def compare(learner, items: dict[str, torch.Tensor], batch: Transitions | Sequences) -> None:
    found = score(learner, batch).priorities.numpy()
    start = items["priority"].numpy()
    assert len(start) > 10 and np.isfinite(start).all() and start.min() >= 0
    np.testing.assert_allclose(start, found, atol=1e-6 * np.abs(start).max(), rtol=1e-5)


@pytest.mark.parametrize("noise", ["gaussian", "ou"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_transitions_arrive_with_the_learners_own_priorities(n_step, noise):
    learner = built(replay=ESTIMATE, n_step=n_step, noise=noise, unroll=6)
    items = items_of(learner)
    columns = {name: items[name] for name in ("action", "reward", "discount", "version")}
    obs, later = ({"obs": items[f"{name}/obs"]} for name in ("obs", "next_obs"))
    assert set((items["discount"] == 0).tolist()) == {True, False}
    compare(learner, items, Transitions(obs=obs, next_obs=later, weight=torch.ones(len(items["reward"])), **columns))


@pytest.mark.parametrize("core", ["gru", "lstm"])
@pytest.mark.parametrize("burn_in, n_step", [(0, 1), (2, 3)])
def test_sequences_arrive_with_the_learners_own_priorities(core, burn_in, n_step):
    net = NetConfig(hidden=(8,), core=core, core_size=5)
    rows = {"unroll": 6, "sequence": 4, "burn_in": burn_in, "overlap": 1}
    learner = built(net=net, replay=ESTIMATE, n_step=n_step, noise="ou", **rows)
    items = items_of(learner, 12)
    rows = {name: items[name].transpose(0, 1) for name in ("action", "reward", "terminated", "truncated", "live")}
    states = {path: x for path, x in items.items() if path.startswith("state/")}
    compare(learner, items, Sequences(
        obs={"obs": items["obs/obs"].transpose(0, 1)}, state=tree.unflatten(states)["state"],
        weight=torch.ones(len(items["reward"])), version=items["version"], **rows,
    ))  # fmt: skip
