"""Published weights: what the learner reads out is what an actor acts with, to the last bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from support_lanes import BOX, DISCRETE, MULTI, SMALL, ScriptedLanes, build
from torch import nn

from rookery.algorithms.ppo import PPO
from rookery.core.config import NetConfig
from rookery.core.unroll import empty_unroll, unroll_shapes
from rookery.roles.actor import Actor
from rookery.roles.learner import Learner
from rookery.roles.weights import Published

NETS = {
    "split": NetConfig(hidden=(8,)),
    "shared": NetConfig(hidden=(8,), shared=True),
    "gru2": NetConfig(hidden=(8,), core="gru", core_size=5, core_layers=2),
    "lstm": NetConfig(hidden=(8,), core="lstm", core_size=5),
    "state_std": NetConfig(hidden=(8,), state_std=True),
}


def far_end(rig, seed: int = 1234) -> tuple[nn.ModuleDict, Published]:
    """The nets of an actor process: built by itself, from other random numbers."""
    torch.manual_seed(seed)
    nets = rig.algorithm.nets()
    return nets, Published(rig.algorithm, nets)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("action", [DISCRETE, MULTI, BOX], ids=lambda spec: spec.kind)
@pytest.mark.parametrize("name", NETS)
def test_an_actor_with_pulled_weights_does_exactly_what_the_learners_own_would(name, action, normalize):
    """Actions, log-probabilities, states and stored values, after updates of weights and statistics."""
    net = dataclasses.replace(NETS[name], normalize_obs=normalize)
    rig = build(lambda: ScriptedLanes(action=action, offset=3.0), net=net)
    nets, published = far_end(rig)
    assert published.size == rig.learner.published.size
    shapes = unroll_shapes(rig.algorithm.spec, rig.algorithm.plan(), 4, rig.algorithm.initial_state(nets, 1))
    out = empty_unroll(shapes)
    actor = Actor(rig.algorithm, nets, ScriptedLanes(action=action, offset=3.0), seed=7, index=0)
    actor.reset()
    for _ in range(3):
        published.load(rig.learner.published.read())
        batch = rig.collect()
        actor.unroll(out, rig.learner.version)
        np.testing.assert_array_equal(out.action, batch.action.numpy())
        np.testing.assert_array_equal(out.logp, batch.logp.numpy())
        for leaf, stored in out.state0.items():
            np.testing.assert_array_equal(stored, batch.state0[leaf].numpy())
        assert out.extras.keys() == batch.extras.keys()
        for key, stored in out.extras.items():
            np.testing.assert_array_equal(stored, batch.extras[key].numpy())
        rig.learner.step(batch, 0.0)


def test_the_vector_is_a_copy():
    rig = build(net=NetConfig(hidden=(8,), normalize_obs=True))
    before = rig.learner.published.read()
    kept = before.clone()
    rig.update()
    assert torch.equal(before, kept)
    after = rig.learner.published.read()
    assert after.shape == kept.shape == (rig.learner.published.size,) and after.dtype == torch.float32
    assert not torch.equal(after, kept)
    before.fill_(0)
    assert torch.equal(rig.learner.published.read(), after)


def test_loading_what_was_read_changes_nothing():
    rig = build(net=NetConfig(hidden=(8,), normalize_obs=True))
    rig.update()
    before = {key: value.clone() for key, value in rig.learner.nets.state_dict().items()}
    rig.learner.published.load(rig.learner.published.read())
    assert all(torch.equal(before[key], value) for key, value in rig.learner.nets.state_dict().items())


def test_statistics_travel_with_the_weights():
    rig = build(lambda: ScriptedLanes(offset=100.0), net=NetConfig(hidden=(8,), normalize_obs=True))
    nets, published = far_end(rig)
    for _ in range(2):
        rig.update()
    published.load(rig.learner.published.read())
    obs = {"obs": torch.tensor([[101.0, 104.0, 102.0], [1e6, -1e6, 100.0]])}
    assert torch.equal(nets["normalizer"](obs)["obs"], rig.learner.nets["normalizer"](obs)["obs"])
    assert nets["normalizer"](obs)["obs"].abs().max() == 10


def test_only_what_acting_needs_is_published():
    rig = build()
    nets, published = far_end(rig)
    before = {key: value.clone() for key, value in nets.state_dict().items()}
    published.load(rig.learner.published.read())
    changed = {key.partition(".")[0] for key, value in nets.state_dict().items() if not torch.equal(before[key], value)}
    assert changed == {"body", "policy"}
    assert published.size < rig.learner.flat["all"].data.numel()


class Swapped(PPO):
    """Publishes in another order than its group has: body and policy would change places."""

    def __init__(self, *args):
        super().__init__(*args)
        self.published = ("policy", "body")


def test_an_order_that_would_mix_up_the_weights_is_refused_or_harmless():
    algorithm = Swapped(SMALL, NETS["split"], ScriptedLanes().spec, 4)
    try:
        learner = Learner(algorithm, seed=1)
        nets = algorithm.nets()
        Published(algorithm, nets).load(learner.published.read())
    except ValueError:
        return
    for name in ("policy", "body"):
        for mine, theirs in zip(nets[name].parameters(), learner.nets[name].parameters(), strict=True):
            assert torch.equal(mine, theirs)
