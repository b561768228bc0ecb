"""Masks of legal actions where it is learnt: what is never legal has no part in any loss, target or priority."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support_actor_critic import CORES, rig
from support_dqn import SMALL, SPEC, built, minibatch, parcel_of, sequences, transitions
from support_masks import Maskable

from rookery.algorithms.a2c import A2C, A2CConfig
from rookery.algorithms.appo import APPO, APPOConfig
from rookery.algorithms.dqn import DQN
from rookery.algorithms.impala import IMPALA, IMPALAConfig
from rookery.algorithms.ppo import PPO, PPOConfig
from rookery.core.config import NetConfig, ReplayConfig
from rookery.core.reduce import ALONE
from rookery.core.types import MASK, Leaf, Transitions
from rookery.envs.lanes import SyncLanes
from rookery.nets import build
from rookery.roles.learner import Learner

KINDS = {
    "ppo": (PPO, PPOConfig(unroll=6, chunk=3, minibatches=2)),
    "a2c": (A2C, A2CConfig(unroll=6)),
    "impala": (IMPALA, IMPALAConfig(unroll=6)),
    "appo": (APPO, APPOConfig(unroll=6, chunk=3, kl=0.5)),
    "impact": (APPO, APPOConfig(unroll=6, chunk=3, target_period=2)),
}


class Never(Maskable):
    """The last choice of each branch is never legal."""

    def _drawn(self, n: int) -> np.ndarray:
        mask = super()._drawn(n)
        mask[-1] = False
        mask[self.np_random.integers(n - 1)] = True
        return mask


def lanes(multi: bool = False, kind: type[Maskable] = Maskable, count: int = 4) -> Callable[[], SyncLanes]:
    return lambda: SyncLanes("m", [kind("info", multi) for _ in range(count)], masks="info")


# Policies


@pytest.mark.parametrize("multi", [False, True], ids=["one", "branches"])
@pytest.mark.parametrize("core", CORES)
def test_the_ratio_is_1_before_the_first_minibatch_of_every_update(core, multi):
    wired = rig(*KINDS["ppo"], lanes(multi), CORES[core])
    nets = wired.learner.nets
    for _ in range(3):
        batch = wired.collect()
        prepared = wired.prepared(batch)
        with torch.no_grad():
            params = build.policy_value_sequence(nets, prepared.obs, prepared.state, prepared.reset).params
            new = nets["policy"].logp_entropy(params, prepared.action)[0]
        live = prepared.weight > 0
        torch.testing.assert_close(new[live], prepared.logp[live], rtol=0, atol=1e-6)
        assert live.sum() > 15 and not batch.obs[MASK].all()
        wired.learner.step(batch, 0.0)


@pytest.mark.parametrize("kind", ["impala", "appo"])
def test_data_without_lag_has_the_probabilities_that_the_learner_computes(kind):
    wired = rig(*KINDS[kind], lanes(), CORES["gru"])
    report = wired.update()
    assert report.metrics["rho"] == pytest.approx(1, abs=1e-5)
    assert report.metrics["kl"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("multi", [False, True], ids=["one", "branches"])
def test_an_even_policy_is_even_over_the_legal_actions_of_every_branch(multi):
    wired = rig(*KINDS["ppo"], lanes(multi))
    with torch.no_grad():
        for parameter in wired.learner.nets["policy"].parameters():
            parameter.zero_()
    batch = wired.collect()
    mask, live = batch.obs[MASK][:-1][batch.live], batch.live
    parts = mask.split(Maskable(multi=multi).choices, -1)
    expected = torch.stack([part.sum(-1).float().log() for part in parts]).sum(0)
    params = wired.algorithm.forward(wired.learner.nets, batch).params
    logp, entropy = wired.learner.nets["policy"].logp_entropy(params, batch.action)
    torch.testing.assert_close(entropy[live], expected)
    torch.testing.assert_close(logp[live], -expected)
    torch.testing.assert_close(batch.logp[live], -expected)


@pytest.mark.parametrize("multi", [False, True], ids=["one", "branches"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_never_legal_changes_no_loss_and_gets_no_gradient(kind, multi):
    wired = rig(*KINDS[kind], lanes(multi, Never))
    batch, nets = wired.collect(), wired.learner.nets
    linear = nets["policy"].linear
    heads = [linear, *([nets["target"]["policy"].linear] if "target" in nets else [])]
    never = [2, 7] if multi else [5]

    def loss() -> torch.Tensor:
        prepared = wired.prepared(batch)
        piece = next(iter(wired.algorithm.minibatches(prepared, torch.Generator().manual_seed(1), ALONE)))
        return wired.algorithm.losses(nets, piece).losses["all"]

    before = loss()
    gradient = torch.autograd.grad(before, linear.weight)[0]
    assert not gradient[never].any() and gradient.any(1).sum() == len(gradient) - len(never)
    with torch.no_grad():
        for head in heads:
            head.bias[never] += 50.0
        torch.testing.assert_close(loss(), before.detach(), rtol=1e-6, atol=1e-6)
        linear.bias[0] += 1.0
        assert abs(loss() - before) > 1e-4


# Action values


MASKED = dataclasses.replace(SPEC, obs=SPEC.obs | {MASK: Leaf((3,), "bool", "mask")}, mask_from="info")
VALUES = {
    "double": (NetConfig(hidden=()), {}),
    "one net": (NetConfig(hidden=()), {"double": False}),
    "c51": (NetConfig(hidden=()), {"atoms": 11}),
    "r2d2": (NetConfig(core="lstm", core_size=5), {"rescale": True, "n_step": 2}),
    "r2d2, c51": (NetConfig(core="gru", core_size=5), {"atoms": 11, "double": False}),
}


def items_of(learner: Learner, follows: bool):
    """Items in which actions 0 and 1 are taken. Action 2 is legal in rows that follow one that is learnt, or in none
    of these (in sequences it is legal in the rows before)."""
    if learner.algorithm.recurrent:
        found = sequences(learner, {1: (5, "terminated"), 2: (6, "truncated")})
        mask = torch.ones(found.obs["obs"].shape, dtype=torch.bool)
        behind = torch.arange(len(mask)) > learner.algorithm.config.burn_in
        mask[..., 2] = (behind == follows).unsqueeze(1)
        mask &= (found.obs["obs"] != 0).any(-1, keepdim=True)  # rows that are missing have no mask
        return dataclasses.replace(found, obs=found.obs | {MASK: mask}, action=found.action.clamp(max=1))
    found = transitions()
    obs, behind = (
        {**x, MASK: torch.tensor([True, True, legal]).expand(8, 3)}
        for x, legal in ((found.obs, not follows), (found.next_obs, follows))
    )
    return dataclasses.replace(found, obs=obs, next_obs=behind, action=found.action.clamp(max=1))


@pytest.mark.parametrize("name", VALUES)
def test_the_value_of_an_action_counts_where_it_is_legal_behind_a_row(name):
    net, changes = VALUES[name]
    found = {}
    for follows in (False, True):
        learner = built(net, spec=MASKED, **changes)
        nets, given = learner.nets, minibatch(learner, items_of(learner, follows))
        before = learner.gradients(given)
        with torch.no_grad():
            for head in (nets["q"], nets["target_q"]):
                head.advantage.layers[-1].bias.view(3, -1)[2, -1] += 20.0  # the value, or the highest atom of it
        found[follows] = before.priorities, learner.gradients(given).priorities
    assert torch.equal(*found[False])
    assert (found[True][0] - found[True][1]).abs().max() > 0.1


@pytest.mark.parametrize("atoms", [0, 51])
@pytest.mark.parametrize("net", [NetConfig(hidden=(8,)), NetConfig(hidden=())], ids=["numpy", "modules"])
@pytest.mark.parametrize("n_step", [1, 3])
def test_an_actor_s_priorities_are_the_learner_s(n_step, net, atoms):
    made = lanes()()
    replay = ReplayConfig(batch=8, min_size=8, start="actor")
    changes = {"unroll": 6, "replay": replay, "n_step": n_step, "atoms": atoms, "v_min": -20.0, "v_max": 20.0}
    config = dataclasses.replace(SMALL, **changes)
    learner = Learner(DQN(config, net, made.spec, 4), seed=1)  # targets start equal
    parcel = parcel_of(learner, made)
    t = {name: torch.from_numpy(x) for name, x in parcel.items()}
    items = Transitions(
        {name: t[f"obs/{name}"] for name in made.spec.obs}, t["action"], t["reward"], t["discount"],
        {name: t[f"next_obs/{name}"] for name in made.spec.obs}, torch.ones(len(t["reward"])), t["version"],
    )  # fmt: skip
    output = learner.gradients(minibatch(learner, items))
    assert len(parcel["priority"]) > 30 and np.ptp(parcel["priority"]) > 0.05
    np.testing.assert_allclose(parcel["priority"], output.priorities.numpy(), rtol=0, atol=1e-5)
    free = dataclasses.replace(items, next_obs=items.next_obs | {MASK: torch.ones_like(items.next_obs[MASK])})
    other = learner.gradients(minibatch(learner, free)).priorities.numpy()
    assert np.abs(parcel["priority"] - other).max() > 1e-3
